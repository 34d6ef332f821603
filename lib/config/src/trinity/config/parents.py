"""<job>/fork.json: the run and the step from which a run was forked."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from trinity.runtime import files
from trinity.runtime.errors import DataLoss

FORK = "fork.json"


@dataclass(frozen=True)
class Parent:
    """`job`: its job folder at the time of the fork; `run`: its id; `changes`: overrides of the fork's configuration.

    `weights`: SHA-256 of the manifest of the checkpoint that both share.
    """

    job: str
    run: str
    name: str
    stage: str
    step: int
    changes: tuple[str, ...] = ()
    weights: str = ""
    forked_at_seconds: float = 0.0


def parent_of(job_dir: Path) -> Parent | None:
    """Returns the parent of a forked run; None for any other run. Raises DataLoss for a damaged file."""
    if not (job_dir / FORK).exists():
        return None
    try:
        return TypeAdapter(Parent).validate_python(files.read_json(job_dir / FORK))
    except ValidationError:
        raise DataLoss(f"{job_dir / FORK} does not name the parent of a fork; fork it again") from None
