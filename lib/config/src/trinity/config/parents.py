"""<job>/fork.json: the run and the step from which a run was forked, and what a regrade changed."""

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from trinity.runtime import files
from trinity.runtime.errors import DataLoss

FORK = "fork.json"


class ForkDamaged(DataLoss):
    """A file that `trinity fork` wrote is not as it was. Another start finds the same."""

    for_good = True


@dataclass(frozen=True)
class Regrade:
    """The parent's groups up to step `through_step` are trained again, with rewards of the function `reward`.

    `reward` empty: with their own. `sha256`: of the plugin file that has the function; empty for an installed one.
    `groups` were taken, `left_out` counts those among them that enter no batch, by reason.
    """

    through_step: int
    reward: str = ""
    sha256: str = ""
    groups: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    without_tasks: tuple[str, ...] = ()
    without_explorers: tuple[str, ...] = ()
    without_versions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Parent:
    """`job`: its job folder at the time of the fork; `run`: its id; `changes`: overrides of the fork's configuration.

    `weights`: SHA-256 of the manifest of the checkpoint that both share; `parts`: of fork/parts.bin.
    """

    job: str
    run: str
    name: str
    stage: str
    step: int
    changes: tuple[str, ...] = ()
    weights: str = ""
    forked_at_seconds: float = 0.0
    regrade: Regrade | None = None
    parts: str = ""


def parent_of(job_dir: Path) -> Parent | None:
    """Returns the parent of a forked run; None for any other run. Raises ForkDamaged for a damaged file."""
    if not (job_dir / FORK).exists():
        return None
    try:
        return TypeAdapter(Parent).validate_python(files.read_json(job_dir / FORK))
    except ValidationError:
        raise ForkDamaged(f"{job_dir / FORK} does not name the parent of a fork; fork it again") from None
