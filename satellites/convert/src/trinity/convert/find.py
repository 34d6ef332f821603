"""Which checkpoints a path means: one step, all steps below it, or the step that contains it."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from trinity.reading.errors import RunError
from trinity.weights.checkpoints import step_of

_PARTIAL = re.compile(r"\.global_step_\d+\.partial")


class CheckpointError(Exception):
    """A checkpoint cannot be converted; the others still are. The message names file and fix."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder `global_step_<step>`; `label` is what the user is shown."""

    folder: Path
    step: int
    label: str

    @property
    def actor(self) -> Path:
        return self.folder / "actor"

    @property
    def huggingface(self) -> Path:
        return self.actor / "huggingface"


def parse_steps(text: str | None) -> frozenset[int] | None:
    """Steps of "100,200"; None for no text. Raises RunError (exit 2) for anything else."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    bad = [part for part in parts if not (part.isascii() and part.isdigit())]
    if bad:
        raise RunError(f"--steps: {bad[0]!r} in {text!r} is not a step; write numbers with commas, as 100,200", 2)
    return frozenset(int(part) for part in parts)


def find_checkpoints(path: Path, steps: frozenset[int] | None = None) -> list[Checkpoint]:
    """Checkpoints that `path` means, by folder and step. Raises RunError (exit 2) if there are none or a step is not
    among them. Folders of unfinished saves (`.global_step_<n>.partial`) are no checkpoints."""
    if not path.exists():
        raise RunError(f"--checkpoint-dir: {path} does not exist", 2)
    root = Path(os.path.abspath(path))
    around = _around(root) or _around(path.resolve())
    folders, root = ([around], around.parent) if around else (_below(root), root)
    found = [_checkpoint(folder, root) for folder in folders]
    if not found:
        raise RunError(f"--checkpoint-dir: no finished global_step_<number> folder in, below or above {path}", 2)
    if steps is None:
        return found
    known = {checkpoint.step for checkpoint in found}
    if missing := sorted(steps - known):
        raise RunError(f"--steps: {path} has no checkpoint of step {_listed(missing)}; it has {_listed(known)}", 2)
    return [checkpoint for checkpoint in found if checkpoint.step in steps]


def _around(path: Path) -> Path | None:
    """The checkpoint folder that `path` is or is inside."""
    for folder in (path, *path.parents):
        if _PARTIAL.fullmatch(folder.name):
            return None
        if step_of(folder) is not None and folder.is_dir():
            return folder
    return None


def _below(root: Path) -> list[Path]:
    if _PARTIAL.search(str(root)):
        return []
    found = []
    for folder, names, _ in os.walk(root):
        steps = [Path(folder, name) for name in names if step_of(Path(name)) is not None]
        found += steps
        names[:] = [name for name in names if Path(folder, name) not in steps and not _PARTIAL.fullmatch(name)]
    return sorted(found, key=lambda path: (path.parent, step_of(path)))


def _checkpoint(folder: Path, root: Path) -> Checkpoint:
    step = step_of(folder)
    assert step is not None
    return Checkpoint(folder, step, str(folder.relative_to(root)))


def _listed(steps: set[int] | list[int]) -> str:
    return ", ".join(str(step) for step in sorted(steps))
