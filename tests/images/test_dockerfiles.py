"""Every Dockerfile: what it copies is there and in the context, what it installs is declared, who it runs as."""

import fnmatch
import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser

from trinity.plugins.satellites import DISTRIBUTIONS

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]
SERVICES = ("buffer", "environment", "explorer", "sync", "trainer")
FILES = {
    "trinity-rft": "scripts/docker/Dockerfile",
    "trinity-ui": "satellites/ui/Dockerfile",
    **{f"trinity-{name}": f"services/{name}/Dockerfile" for name in SERVICES},
}
PARTS = [
    tomllib.loads(path.read_text())["project"] for path in ROOT.glob("*/**/pyproject.toml") if ".venv" not in path.parts
]
EXTRAS = {part["name"]: set(part.get("optional-dependencies", {})) for part in PARTS}
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]


@pytest.fixture(params=FILES, ids=list(FILES))
def dockerfile(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, DockerfileParser]:
    """(name of the image, its Dockerfile); the parser writes beside what it reads, hence the copy."""
    parser = DockerfileParser(str(tmp_path), cache_content=True)
    parser.content = (ROOT / FILES[request.param]).read_text()
    return request.param, parser


def _instructions(parser: DockerfileParser, name: str) -> list[str]:
    return [one["value"] for one in parser.structure if one["instruction"] == name]


def test_every_dockerfile_is_looked_at() -> None:
    tracked = subprocess.run(["git", "ls-files", "*Dockerfile*"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    if tracked.returncode:
        pytest.skip("not a git repository")
    of_tasks = "examples/code/tasks/"  # what an agent works in, not an image of ours
    assert {name for name in tracked.stdout.split() if not name.startswith(of_tasks)} <= set(FILES.values())


def test_two_stages_of_a_base_by_digest(dockerfile: tuple[str, DockerfileParser]) -> None:
    _, parser = dockerfile
    assert _instructions(parser, "FROM") == ["${BASE_IMAGE} AS build", "${BASE_IMAGE}"]
    (base,) = [value for value in _instructions(parser, "ARG") if value.startswith("BASE_IMAGE=")]
    assert re.fullmatch(r"BASE_IMAGE=python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base)


def test_bases_and_the_final_user_are_the_same_everywhere() -> None:
    texts = [(ROOT / file).read_text() for file in FILES.values()]
    assert len({re.search(r"BASE_IMAGE=(\S+)", text)[1] for text in texts}) == 1  # type: ignore[index]
    version = (ROOT / "VERSION").read_text().strip()
    assert all(f"ARG VERSION={version}\n" in text for text in texts)


def test_who_it_runs_as_and_what_it_is_called(dockerfile: tuple[str, DockerfileParser]) -> None:
    name, parser = dockerfile
    assert _instructions(parser, "USER") == ["1000:1000"]
    text = parser.content
    assert text.index("USER 1000:1000") > text.rindex("RUN "), "nothing is installed by the final user"
    for label in ("title", "description", "version", "revision", "licenses"):
        assert f"org.opencontainers.image.{label}=" in text
    assert f'image.title="{name}"' in text
    if name != "trinity-rft":
        assert json.loads(_instructions(parser, "ENTRYPOINT")[0]) == [name]


def test_what_is_copied_exists_and_is_in_the_context(dockerfile: tuple[str, DockerfileParser]) -> None:
    _, parser = dockerfile
    copied = [
        words for words in map(str.split, _instructions(parser, "COPY")) if not words[0].startswith("--from=build")
    ]
    assert len(copied) > 3
    for *sources, _ in copied:
        for source in sources:
            assert (ROOT / source).exists(), source
            files = (
                [source] if (ROOT / source).is_file() else [f"{source}/{path}" for path in _some_files(ROOT / source)]
            )
            assert any(_is_sent(file) for file in files), f"{source} is excluded by .dockerignore"


def _some_files(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _is_sent(file: str) -> bool:
    """By .dockerignore's rules: the last pattern that matches the file, or a folder above it, decides."""
    sent = True
    parts = file.split("/")
    paths = ["/".join(parts[: length + 1]) for length in range(len(parts))]
    for line in IGNORED:
        pattern = line.removeprefix("!")
        tails = [pattern.removeprefix("**/")] if pattern.startswith("**/") else []
        names = [path.rpartition("/")[2] for path in paths] if tails else paths
        if any(fnmatch.fnmatchcase(name, tails[0] if tails else pattern) for name in names):
            sent = line.startswith("!")
    return sent


@pytest.mark.parametrize(
    "file",
    [
        ".git/config", ".venv/bin/python", "identity/ca/ca.key", "identity/operator/nats.creds", "checkpoints/q/w",
        "build/quickstart/model/config.json", ".env", "examples/.env", "examples/run/checkpoints/x", "lib/a.key",
        "services/buffer/tests/test_it.py", "deploy/compose/compose.yaml", "dist/trinity.whl", "proto/x/nats.seed",
        "run.yaml", "data/gsm8k/train.jsonl", "lib/data/src/trinity/data/__pycache__/x.pyc",
    ],
)  # fmt: skip
def test_keys_checkpoints_and_histories_stay_outside_of_the_context(file: str) -> None:
    assert not _is_sent(file)


def test_sources_are_in_the_context() -> None:
    packages = [path for folder in ("proto", "*/src", "*/*/src") for path in ROOT.glob(f"{folder}/trinity/**/*.py")]
    left_out = [path for path in (file.relative_to(ROOT).as_posix() for file in packages) if not _is_sent(path)]
    assert len(packages) > 300 and not left_out
    assert all(_is_sent(file) for file in ("requirements/cuda.txt", "hatch_build.py", "README.md", "VERSION"))


def _arguments(parser: DockerfileParser) -> dict[str, str]:
    pairs = [value.partition("=") for value in _instructions(parser, "ARG")]
    return {name: default for name, _, default in pairs}


def _installed(parser: DockerfileParser, device: str) -> list[str]:
    """The requirements that install.sh gets, with the defaults of the build arguments."""
    (command,) = [value for value in _instructions(parser, "RUN") if "install.sh" in value]
    parts = command.partition("install.sh ")[2].replace('"', "").split()
    given = {**_arguments(parser), "DEVICE": device}
    given["ENVIRONMENTS:+,${ENVIRONMENTS}"] = "," + given.get("ENVIRONMENTS", "")
    filled = [re.sub(r"\$\{(ENVIRONMENTS:\+,\$\{ENVIRONMENTS\}|\w+)\}", lambda m: given[m[1]], part) for part in parts]
    assert filled[0] in ("none", device)
    return filled[1:]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_installed_is_copied_and_declared_and_complete(
    device: str, dockerfile: tuple[str, DockerfileParser]
) -> None:
    """Extras are those of a pyproject.toml; a part of Trinity that another requires is installed with it."""
    name, parser = dockerfile
    requirements = _installed(parser, device)
    copied = [source for one in _instructions(parser, "COPY") for source in one.split()[:-1]]
    of_root = {extra for extras in EXTRAS.values() for extra in extras}
    installed, needed = set(), set()
    for requirement in requirements:
        folder, _, listed = requirement.removesuffix("]").removeprefix("./").partition("[")
        extras = set(filter(None, listed.split(",")))
        if folder == ".":
            assert extras <= of_root, extras - of_root
            continue
        assert any(folder == source or folder.startswith(f"{source}/") for source in copied), folder
        part = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        assert extras <= EXTRAS[part["name"]], extras - EXTRAS[part["name"]]
        installed.add(part["name"])
        needed |= {found[0] for line in part["dependencies"] if (found := re.match(r"trinity-[a-z-]+", line))}
    needed |= _satellites(name.removeprefix("trinity-"))
    assert needed <= installed, needed - installed
    assert name == "trinity-rft" or name in installed


def _satellites(service: str) -> set[str]:
    """Distributions that a service looks for by hooks and as places of metrics."""
    source = "".join(path.read_text() for path in (ROOT / "services" / service).glob("src/**/*.py"))
    found = {DISTRIBUTIONS[hook] for hook in re.findall(r'\b(?:find|hook)\("(\w+)"', source) if hook in DISTRIBUTIONS}
    return found | ({"trinity-trackers"} if "open_monitor" in source else set())


def test_services_look_for_satellites() -> None:
    assert {name: _satellites(name) for name in ("buffer", "explorer", "trainer")} == {
        "buffer": {"trinity-archive", "trinity-compat-rft", "trinity-traffic", "trinity-trackers"},
        "explorer": {"trinity-compat-rft", "trinity-traffic"},
        "trainer": {"trinity-trackers"},
    }


def test_no_package_is_installed_but_from_a_lock(dockerfile: tuple[str, DockerfileParser]) -> None:
    _, parser = dockerfile
    for command in _instructions(parser, "RUN"):
        assert not re.search(r"\b(pip|uv|curl|wget)\b", command), command
    script = (ROOT / "scripts/docker/install.sh").read_text()
    for line in script.replace("\\\n", " ").splitlines():
        if re.search(r"pip.* install ", line) or line.strip().startswith("torch="):
            assert "--require-hashes" in line or "-b requirements/build.txt $options" in line, line


def _of_lock(lock: str) -> dict[str, str]:
    text = (ROOT / f"requirements/{lock}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9._-]+)==([^ ;]+)[^\n]*\\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE))


def test_the_locks_of_images_hold_what_the_extras_need() -> None:
    """Also what images are built with, whose versions other locks repeat."""
    extras: dict[str, list[str]] = {}
    for part in PARTS:
        for extra, lines in part.get("optional-dependencies", {}).items():
            extras.setdefault(extra, []).extend(line for line in lines if not line.startswith("trinity-"))
    makefile = re.search(r"^IMAGE_EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert makefile
    for lock in ("image-cpu", "cuda"):
        held = _of_lock(lock)
        for extra in makefile[1].split():
            names = {re.split(r"[^A-Za-z0-9_.-]", line)[0].lower().replace("_", "-") for line in extras[extra]}
            assert names <= held.keys(), f"requirements/{lock}.txt lacks {names - held.keys()}: make lock"
    assert {"uv", "hatchling", "cyclonedx-bom", "setuptools", "wheel"} <= _of_lock("build").keys()
    assert _of_lock("torch-cpu")["torch"].endswith("+cpu")


def test_compose_builds_these_files() -> None:
    composed: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text())["services"]
    for name in SERVICES:
        assert composed[name]["build"]["dockerfile"] == FILES[f"trinity-{name}"]
        assert composed[name]["image"] == f"trinity-{name}"
    assert composed["nats"]["image"].startswith("nats:2.15.")
    others = {name: one["image"] for name, one in composed.items() if "build" not in one}
    by_digest = re.compile(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}")
    unpinned = {name for name, image in others.items() if not by_digest.fullmatch(image)}
    assert len(others) == 5 and not unpinned, f"not by digest: {unpinned}"
