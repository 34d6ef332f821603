"""`make lint` fails on a service that imports another, on `_pb2` outside its modules, and on a new cycle."""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]
Lint = Callable[[], subprocess.CompletedProcess[str]]


@pytest.fixture
def lint(tmp_path: Path) -> Lint:
    """Runs lint-imports on a copy of the product in tmp_path."""
    sources = [ROOT / "proto", ROOT / "sdk/src", ROOT / "cli/src"]
    sources += [*ROOT.glob("lib/*/src"), *ROOT.glob("services/*/src"), *ROOT.glob("satellites/*/src")]
    for source in sources:
        shutil.copytree(source, tmp_path / source.relative_to(ROOT), ignore=shutil.ignore_patterns("__pycache__"))
    path = os.pathsep.join(str(tmp_path / source.relative_to(ROOT)) for source in sources)
    command = [
        str(Path(sys.executable).with_name("lint-imports")),
        "--no-cache",
        "--config",
        str(ROOT / ".importlinter"),
    ]
    env = {**os.environ, "PYTHONPATH": path}
    return lambda: subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        (
            {"services/buffer/src/trinity/buffer/new.py": "import trinity.sync.versions\n"},
            "trinity.buffer.new -> trinity.sync.versions",
        ),
        (
            {"services/trainer/src/trinity/trainer/model/new.py": "from trinity.api.sync.v1 import sync_pb2\n"},
            "trinity.trainer.model.new -> trinity.api.sync.v1.sync_pb2",
        ),
        (
            {
                "services/sync/src/trinity/sync/new.py": "from trinity.sync import newer\n",
                "services/sync/src/trinity/sync/newer.py": "from trinity.sync import new\n",
            },
            ".newer -> .new",
        ),
    ],
    ids=["a service imports a service", "protobuf outside its modules", "a cycle"],
)
def test_lint_fails_on(added: dict[str, str], problem: str, lint: Lint, tmp_path: Path) -> None:
    for path, text in added.items():
        (tmp_path / path).write_text(text)
    done = lint()
    assert done.returncode == 1 and problem in " ".join(done.stdout.split()), done.stdout + done.stderr


def test_lint_passes_as_it_is(lint: Lint) -> None:
    done = lint()
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_checks_every_folder_and_the_calls_in_tests() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    checked = {folder for pattern in settings["files"] for folder in ROOT.glob(pattern)}
    parts = [
        path
        for name in ("src", "tests")
        for top in ("sdk", "cli", "lib/*", "services/*", "satellites/*")
        for path in ROOT.glob(f"{top}/{name}")
    ]
    assert {*parts, *(ROOT / name for name in ("benchmarks", "docs", "examples", "scripts", "tests"))} == checked
    of_tests = next(rules for rules in settings["overrides"] if "e2e.*" in rules["module"])
    assert not {"call-arg", "call-overload", "attr-defined", "name-defined"} & set(of_tests["disable_error_code"])
