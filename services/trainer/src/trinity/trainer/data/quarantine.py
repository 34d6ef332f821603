"""Batches of bad steps, stored for inspection: `trinity replay-step` trains one again.

<job>/bad_steps/step_<k>/
    batch.bin       the ledger entry and its groups or rows, as the trainer got them
    report.json     the error, and loss, advantage and ratio of every group
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trinity.runtime import files
from trinity.trainer.data.bad_steps import BadStep
from trinity.trainer.data.client import RawBatch, decode_batch, encode_batch

_BATCH, _REPORT = "batch.bin", "report.json"


def folder_of(job_dir: Path, step: int) -> Path:
    return job_dir / "bad_steps" / f"step_{step}"


def store(job_dir: Path, raw: RawBatch, error: BadStep, policy: str, groups: Sequence[dict[str, Any]]) -> Path:
    """Write the batch and its report; returns the folder. A step that is bad again is overwritten."""
    folder = folder_of(job_dir, raw.entry.step)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_atomic(folder / _BATCH, encode_batch(raw))
    report = {
        "step": raw.entry.step,
        "problem": error.problem,
        "policy": policy,
        "blamed": [_named(raw, index) for index in error.groups],
        "groups": named(raw, groups),
    }
    files.write_json(folder / _REPORT, report)
    return folder


def named(raw: RawBatch, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Statistics of groups, each with its task or row."""
    return [{**_named(raw, group["group"]), **group} for group in groups]


def read_batch(job_dir: Path, step: int) -> RawBatch:
    """Raises FileNotFoundError if the step is not stored."""
    return decode_batch((folder_of(job_dir, step) / _BATCH).read_bytes())


def _named(raw: RawBatch, index: int) -> dict[str, Any]:
    """A group's index in the batch, and its task or row."""
    groups, rows = raw.entry.groups, raw.examples
    if index < len(groups):
        return {"group": index, "task_id": groups[index].task_id, "log_sequence": groups[index].log_sequence}
    row = index - len(groups)
    return {"group": index, **({"row": rows[row].row} if row < len(rows) else {})}
