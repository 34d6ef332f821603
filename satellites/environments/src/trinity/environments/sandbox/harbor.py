"""A task in Harbor's form, of a row: trinity.data.task_folders makes rows of folders."""

import base64
import binascii
import posixpath
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.sandbox.bubblewrap import refused_folder
from trinity.environments.sandbox.sandbox import File
from trinity.runtime.errors import InvalidInput

_MAX_FILES = 1000
# What needs no work here: the machine's own programs are the base.
_WITHOUT_EFFECT = ("FROM", "LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "ARG", "USER", "SHELL", "STOPSIGNAL", "HEALTHCHECK")


@dataclass
class Harbor:
    """`files`: at absolute paths when the episode begins; `tests`: when it ends; `solution`: only for the oracle.

    `context`: the files of environment/ as they are, for a backend that builds its image; `machine`: what the task says
    of it.
    """

    instruction: str
    files: dict[str, File]
    tests: dict[str, File]
    solution: dict[str, File]
    context: dict[str, File]
    machine: dict[str, Any]
    image: str = ""
    workdir: str = "/app"
    env: dict[str, str] = field(default_factory=dict)
    verifier_env: dict[str, str] = field(default_factory=dict)
    verifier_seconds: float = 60.0
    memory_mib: int | None = None
    disk_mib: int | None = None

    @classmethod
    def read(cls, row: Arguments, builds: bool = False) -> "Harbor":
        """builds: the backend makes an image of the Dockerfile. Raises InvalidInput naming the part of the row."""
        config = row.mapping("config")
        verifier, machine = (_section(config, name) for name in ("verifier", "environment"))
        context = dict(_files(row, "environment", ""))
        found = cls(
            instruction=row.text("instruction"),
            files={},
            tests=dict(_files(row, "tests", "/tests")),
            solution=dict(_files(row, "solution", "/solution")),
            context=context,
            machine=machine,
            image=str(machine.get("docker_image") or ""),
            verifier_env=_texts(verifier.get("env", {}), "task.config.verifier.env"),
            verifier_seconds=min(_number(verifier, "verifier", "timeout_sec", 60.0), 100.0),
            memory_mib=_mib(machine, "memory_mb"),
            disk_mib=_mib(machine, "storage_mb"),
        )
        if "/tests/test.sh" not in found.tests:
            raise InvalidInput("task.tests", "has no test.sh, which writes the reward")
        if builds:
            found.workdir = ""
            return found
        found._follow(context)
        for name, path in (("WORKDIR", found.workdir), *(("COPY", path) for path in found.files)):
            if refused_folder(path):
                raise InvalidInput("task.environment", f"{name} names {path}, which is of the system; use /app")
        return found

    @property
    def folders(self) -> set[str]:
        """Returns the folders at the top of the tree that must exist and be writable."""
        return {"/" + path.strip("/").partition("/")[0] for path in (self.workdir, *self.files)}

    def _follow(self, context: dict[str, File]) -> None:
        """Follows the Dockerfile as far as it needs no image. Without a Dockerfile every file goes to /app."""
        dockerfile = context.pop("Dockerfile", None)
        if dockerfile is None:
            self.files = {f"/app/{path}": file for path, file in context.items()}
            return
        for words in _instructions(dockerfile.data.decode(errors="replace")):
            name, rest = words[0].upper(), words[1:]
            if name == "WORKDIR" and len(rest) == 1:
                self.workdir = posixpath.normpath(posixpath.join(self.workdir, rest[0]))
            elif name == "ENV" and rest:
                pairs = [rest] if "=" not in rest[0] else [word.split("=", 1) for word in rest]
                self.env |= {pair[0]: " ".join(pair[1:]) for pair in pairs}
            elif name in ("COPY", "ADD") and len(rest) >= 2 and not any("://" in part for part in rest):
                self._copy(context, [part for part in rest if not part.startswith("--chmod=")])
            elif name not in _WITHOUT_EFFECT:
                what = f"the Dockerfile has {name} {' '.join(rest)[:100]}, which bubblewrap cannot do"
                raise InvalidInput(
                    "task.environment", f"{what}; play it with `backend: docker` or a runtime of Harbor's"
                )

    def _copy(self, context: dict[str, File], parts: list[str]) -> None:
        *sources, target = parts
        into = posixpath.normpath(posixpath.join(self.workdir, target))
        for source in (posixpath.normpath(source.lstrip("/") or ".") for source in sources):
            found = False
            for path, file in context.items():
                if path == source:
                    folder = target.endswith(("/", ".")) or len(sources) > 1
                    self.files[f"{into}/{posixpath.basename(path)}" if folder else into] = file
                    found = True
                elif source == "." or path.startswith(source + "/"):
                    self.files[posixpath.join(into, path if source == "." else path[len(source) + 1 :])] = file
                    found = True
            if not found:
                raise InvalidInput("task.environment", f"the Dockerfile copies {source!r}, which is not there")


def _instructions(text: str) -> Iterator[list[str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line)
        except ValueError:
            words = line.split()
        if words:
            yield words


def _files(row: Arguments, name: str, folder: str) -> Iterator[tuple[str, File]]:
    given = row.get(name, [])
    if not isinstance(given, list) or len(given) > _MAX_FILES:
        raise row.wrong(name, given, f"a list of at most {_MAX_FILES} files")
    for entry in given:
        path = entry.get("path") if isinstance(entry, dict) else None
        normal = posixpath.normpath(path) if isinstance(path, str) and path else ".."
        if normal.startswith(("..", "/")) or "\0" in normal:
            raise row.wrong(name, path, "files with a relative `path` that stays in its folder")
        yield posixpath.join(folder, normal), File(_data(row, name, entry), entry.get("executable") is True)


def _data(row: Arguments, name: str, entry: dict[str, Any]) -> bytes:
    if isinstance(text := entry.get("text"), str):
        return text.encode("utf-8", "surrogatepass")
    try:
        return base64.b64decode(entry["base64"], validate=True)
    except (KeyError, TypeError, ValueError, binascii.Error):
        raise row.wrong(name, entry.get("path"), "files with `text` or `base64`") from None


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name, {})
    if not isinstance(found, dict):
        raise InvalidInput(f"task.config.{name}", f"is {found!r:.100}, must be a table")
    return found


def _number(section: dict[str, Any], where: str, name: str, default: float) -> float:
    found = section.get(name, default)
    if type(found) not in (int, float) or not 0 < found < 1e6:
        raise InvalidInput(f"task.config.{where}.{name}", f"is {found!r:.100}, must be a positive number")
    return float(found)


def _mib(section: dict[str, Any], name: str) -> int | None:
    return int(_number(section, "environment", name, 1)) if name in section else None


def _texts(found: Any, where: str) -> dict[str, str]:
    if not isinstance(found, dict):
        raise InvalidInput(where, f"is {found!r:.100}, must be a table")
    return {str(name): str(value) for name, value in found.items()}
