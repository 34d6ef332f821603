"""The root distribution and those of the parts: one version, every module, every requirement and extra."""

import ast
import re
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]
VERSION = (ROOT / "VERSION").read_text().strip()
PARTS = sorted(
    path.parent
    for path in ROOT.glob("*/**/pyproject.toml")
    if path.relative_to(ROOT).parts[0] not in (".venv", "build")
)
IDS = [str(part.relative_to(ROOT)) for part in PARTS]
OF_A_PART = re.compile(r"(trinity-[a-z-]+)(\[[a-z,-]+\])?")


def _project(folder: Path) -> Any:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def _requirements(project: Any) -> list[str]:
    extras = project.get("optional-dependencies", {}).values()
    return [*project.get("dependencies", []), *(line for extra in extras for line in extra)]


def _sources(part: Path) -> Path:
    return part / "src" if (part / "src").is_dir() else part


def _modules(part: Path) -> set[str]:
    folder = _sources(part)
    return {path.relative_to(folder).as_posix() for path in folder.glob("trinity/**/*.py")}


@pytest.fixture(scope="module")
def root() -> Any:
    """The root's requirements, extras and commands for pip, as hatch_build.py fills them in."""
    return ProjectMetadata(str(ROOT), PluginManager()).core


@pytest.mark.parametrize("part", PARTS, ids=IDS)
def test_every_part_has_the_version_of_all_and_requires_the_others_in_it(part: Path) -> None:
    assert ProjectMetadata(str(part), PluginManager()).version == VERSION
    minor = ".".join(VERSION.split(".")[:2])
    for line in _requirements(_project(part)):
        if OF_A_PART.match(line):
            assert line.endswith(f"=={minor}.*"), f"{part}/pyproject.toml: {line!r} should end in =={minor}.*"


@pytest.mark.parametrize("part", PARTS, ids=IDS)
def test_a_part_requires_every_part_that_it_imports(part: Path) -> None:
    """deptry in `make lint` checks other packages; it takes all parts for one package, `trinity`."""
    homes = {name: _project(other)["name"] for other in PARTS for name in _packages(other)}
    required = {_project(part)["name"]}
    required |= {found[1] for line in _requirements(_project(part)) if (found := OF_A_PART.match(line))}
    for module in sorted(_modules(part)):
        for name in _imports(_sources(part) / module):
            home = homes.get(name.partition(".")[2].partition(".")[0]) if name.startswith("trinity.") else None
            assert home is None or home in required, f"{part}: {module} imports {name}, which is in {home}"


def _packages(part: Path) -> set[str]:
    return {Path(module).parts[1] for module in _modules(part)}


def _imports(path: Path) -> list[str]:
    """Returns the names of imported modules, also under `if TYPE_CHECKING` and inside functions."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def test_the_root_lists_the_sources_of_every_part() -> None:
    """The lists serve its wheel, the editable installation and mypy."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    folders = {_sources(part).relative_to(ROOT).as_posix() for part in PARTS}
    build = tool["hatch"]["build"]
    assert set(build["dev-mode-dirs"]) == folders
    assert set(build["targets"]["wheel"]["packages"]) == {f"{folder}/trinity" for folder in folders}
    assert set(tool["mypy"]["mypy_path"]) == {*folders, "scripts", "tests"}


def test_the_root_has_every_requirement_extra_and_command_of_the_parts(root: Any) -> None:
    of_root = {re.sub(r"\s", "", line) for line in root.dependencies}
    for part in PARTS:
        project = _project(part)
        for line in project.get("dependencies", []):
            assert OF_A_PART.match(line) or _name(line) in {_name(kept) for kept in of_root}, f"{part}: {line}"
        for extra, lines in project.get("optional-dependencies", {}).items():
            kept = {_name(line) for line in root.optional_dependencies[extra]}
            assert {_name(line) for line in lines if not OF_A_PART.match(line)} <= kept, f"{part}: {extra}"
        assert project.get("scripts", {}).items() <= root.scripts.items()
    assert not [line for line in _requirements_of(root) if OF_A_PART.match(line)]


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert found, requirement
    return found[0].lower().replace("_", "-")


def _requirements_of(root: Any) -> list[str]:
    return [*root.dependencies, *(line for lines in root.optional_dependencies.values() for line in lines)]


@pytest.mark.parametrize("folder", [ROOT, *PARTS], ids=[".", *IDS])
def test_a_wheel_holds_every_module(folder: Path, tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(folder)).build(directory=str(tmp_path), versions=["standard"])
    held = set(zipfile.ZipFile(wheel).namelist())
    expected = set().union(*(_modules(part) for part in PARTS)) if folder == ROOT else _modules(folder)
    assert expected
    assert expected <= held
    assert not [name for name in held if not name.startswith(("trinity/", "trinity-", "trinity_"))]
    assert VERSION in Path(wheel).name


@pytest.mark.parametrize(("lock", "extra"), [("cpu", "cpu"), ("run", "cpu"), ("image-cpu", "cpu"), ("cuda", "cuda")])
def test_every_line_of_a_lock_has_hashes_and_every_requirement_is_in_it(lock: str, extra: str, root: Any) -> None:
    text = (ROOT / f"requirements/{lock}.txt").read_text()
    entries = re.findall(
        r"^([A-Za-z0-9_.-]+)(?:\[.*\])?==[^\n]*\\\n((?: +--hash=sha256:[0-9a-f]{64}.*\n)+)", text, re.M
    )
    assert len(entries) == len(re.findall(r"^[A-Za-z0-9]", text, re.MULTILINE))
    elsewhere = {"torch"} if extra == "cpu" else set()  # torch-cpu.txt
    names = {_name(name) for name, _ in entries} | elsewhere
    missing = {_name(line) for line in [*root.dependencies, *root.optional_dependencies[extra]]} - names
    assert not missing, f"requirements/{lock}.txt lacks {missing}: make lock"
