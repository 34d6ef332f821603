"""Steps that cannot be trained: their errors, and their batches, stored so that `trinity replay-step` can retry them.

<job>/bad_steps/step_<k>/
    batch.bin       the ledger entry and its groups or rows, as the trainer got them
    report.json     the error, and loss, advantage and ratio of every group
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trinity.runtime import files
from trinity.runtime.errors import TrinityError
from trinity.trainer.data.client import RawBatch, decode_batch, encode_batch

_BATCH, _REPORT = "batch.bin", "report.json"


class BadStep(TrinityError):
    """The step's batch cannot be trained.

    groups: indices, in the batch, of the groups that cause the error. updates: number of the step's earlier updates,
    which remain applied. among: indices of the groups of the failed update.
    """

    for_good = True  # the ledger has the same batch for the next attempt
    updates = 0
    among: Sequence[int] = ()
    hint = ""

    def __init__(self, problem: str, step: int, groups: Sequence[int] = ()) -> None:
        self.problem = problem
        self.step = step
        self.groups = sorted(set(groups))
        super().__init__(problem)

    def __str__(self) -> str:
        named = ""
        if self.groups:
            named = f"; groups {_listed(self.groups)} of the batch"
        elif self.among:
            named = f"; no single group is the cause, the update was of groups {_listed(self.among)} of the batch"
        return f"step {self.step}: {self.problem}{named}{self.hint}"


def _listed(groups: Sequence[int], most: int = 20) -> str:
    rest = f" and {len(groups) - most} more" if len(groups) > most else ""
    return ", ".join(map(str, groups[:most])) + rest


class NotFinite(BadStep):
    """A reward, an advantage, a loss or the norm of the gradient is NaN or infinite. It has changed no weight."""

    def __init__(self, what: str, step: int, groups: Sequence[int] = ()) -> None:
        super().__init__(f"the {what} is not finite", step, groups)


class Undecodable(BadStep):
    """A group of the batch is invalid, although the buffer accepted it into the log."""


class OutOfMemory(BadStep):
    """Memory was not enough for half a micro-batch."""


class OutOfMemoryAlone(TrinityError):
    """Memory ran out on a rank for which others wait in a collective: the step can neither be undone nor skipped."""

    for_good = True

    def __init__(self, error: OutOfMemory) -> None:
        super().__init__(f"{error}; the other ranks wait for this one, so the trainer ends")


def folder_of(job_dir: Path, step: int) -> Path:
    return job_dir / "bad_steps" / f"step_{step}"


def store(job_dir: Path, raw: RawBatch, error: BadStep, policy: str, groups: Sequence[dict[str, Any]]) -> Path:
    """Writes the batch and its report over earlier ones of the step; returns the folder."""
    folder = folder_of(job_dir, raw.entry.step)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_atomic(folder / _BATCH, encode_batch(raw))
    report = {
        "step": raw.entry.step,
        "problem": error.problem,
        "policy": policy,
        "blamed": [_name(raw, index) for index in error.groups],
        "groups": with_names(raw, groups),
    }
    files.write_json(folder / _REPORT, report)
    return folder


def with_names(raw: RawBatch, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds the task or row to the statistics of each group."""
    return [{**_name(raw, group["group"]), **group} for group in groups]


def read_batch(job_dir: Path, step: int) -> RawBatch:
    """Raises FileNotFoundError if the step is not stored."""
    return decode_batch((folder_of(job_dir, step) / _BATCH).read_bytes())


def _name(raw: RawBatch, index: int) -> dict[str, Any]:
    """Returns a group's index in the batch, with its task or row."""
    groups, rows = raw.entry.groups, raw.examples
    if index < len(groups):
        return {"group": index, "task_id": groups[index].task_id, "log_sequence": groups[index].log_sequence}
    row = index - len(groups)
    return {"group": index, **({"row": rows[row].row} if row < len(rows) else {})}
