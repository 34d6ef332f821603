"""Trained experiences as text: <job>/buffer/experience_buffer.jsonl, which `trinity view` shows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.trainer.data.batch import TrainBatch, TrainSequence


def append(job_dir: Path, entry: pb.LedgerEntry, batch: TrainBatch) -> None:
    """One line for each experience. A step trained again after a crash is written again: its last lines count."""
    folder = job_dir / "buffer"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "experience_buffer.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(_lines(entry, batch))


def _lines(entry: pb.LedgerEntry, batch: TrainBatch) -> Iterator[str]:
    for sequence in batch.sequences:
        if sequence.experience is not None:
            yield json.dumps(_line(entry.step, entry.groups[sequence.group], sequence)) + "\n"


def _line(step: int, group: pb.LedgerGroup, sequence: TrainSequence) -> dict[str, Any]:
    experience = sequence.experience
    assert experience is not None
    return {
        "step": step,
        "task_id": group.task_id,
        "ordinal": group.ordinal,
        "rollout": experience.rollout,
        "turn": experience.step,
        "reward": experience.reward,
        "advantage": sequence.advantage,
        "versions": [[span.version, span.start, span.end] for span in experience.version_spans],
        "staleness": group.staleness_steps,
        "prompt_tokens": sequence.prompt_length,
        "response_tokens": sequence.response_length,
        "truncation": experience.truncation.name.lower(),
        "metrics": dict(experience.metrics),
        "log_sequence": group.log_sequence,
        "prompt": experience.prompt_text,
        "response": experience.response_text,
    }
