"""Trains steps of a run again: the same checkpoint, the same ledger entries, the same log.

    load the run's checkpoint before `first` -> (receive -> train) up to `last` -> save -> compare

Nothing is published, and the run is not affected. All output goes to a separate folder.
"""

import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import safe_open

from trinity.config import Plan
from trinity.runtime import files
from trinity.runtime.errors import InvalidInput
from trinity.trainer.checkpoints import CheckpointStore
from trinity.trainer.control import Control
from trinity.trainer.data.client import BufferClient
from trinity.trainer.data.exchange import share_bytes
from trinity.trainer.engine import TrainEngine
from trinity.trainer.loop import TrainLoop
from trinity.trainer.ranks import Ranks

log = structlog.get_logger(__name__)

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Replay:
    """Steps `first` to `last` again, into `folder`."""

    first: int
    last: int
    folder: Path


class ReplayLoop(TrainLoop):
    """`run` once. It also trains the steps between its first checkpoint and `first`."""

    def __init__(
        self,
        plan: Plan,
        run: str,
        ranks: Ranks,
        engine: TrainEngine,
        control: Control,
        buffer: BufferClient | None,
        replay: Replay,
    ) -> None:
        super().__init__(plan, run, ranks, engine, control, buffer, None, replay.folder)
        self._replay = replay
        self._of_the_run = CheckpointStore(plan.job_dir)
        self._noted = _noted(plan.job_dir)
        self._ends = _schedule_ends(plan.job_dir)

    def _resume(self) -> int:
        """Load the run's newest checkpoint before the first step; without one the base model stays loaded."""
        begin = max((step for step in self._of_the_run.steps() if step < self._replay.first), default=0)
        begin = self._shared(begin)
        state = self._of_the_run.state(begin) if begin else None
        refuse_rollbacks(self._noted, begin, self._replay.last, state.rollback if state else 0)
        if begin:
            self._engine.load(self._of_the_run.path(begin) / "actor")
        elif self._replay.first > 1:
            raise InvalidInput("replay_from", f"is {self._replay.first}; the run keeps no checkpoint of a step before")
        if self._buffer is not None:
            self._buffer.rewind(begin)
        self._last_step = self._replay.last
        self._saved_step = begin
        self._control.update(step=begin, last_step=self._last_step, checkpoint_step=begin)
        log.info("trainer.replay.began", checkpoint_step=begin, first=self._replay.first, last=self._last_step)
        return begin

    def _schedule_end(self, step: int) -> int:
        """The run's last step when it trained this one: a run may be extended later."""
        return self._ends.get(step) or self._plan.total_steps or self._last_step

    def _publish(self, step: int) -> None:
        """No process follows these weights."""

    def _commit(self, step: int, oldest: int) -> None:
        """Only the run's own checkpoints are committed."""

    def _save_if_due(self, step: int) -> None:
        if step == self._last_step:
            self._save(step)
            self._compare(step)

    def _compare(self, step: int) -> None:
        """Compare the weights with the run's checkpoint of the step, if it exists; then the engine holds that one."""
        found: dict[str, Any] = {"step": step, "compared": bool(self._shared(step in self._of_the_run.steps()))}
        if found["compared"]:
            self._engine.load(self._of_the_run.path(step) / "actor")
            weights = self._engine.weights()
            if self._ranks.is_first:
                found |= differences(weights, self._store.path(step) / "actor" / "huggingface")
                log.info("trainer.replay.compared", step=step, different=len(found["different"]))
            else:
                for _ in weights:
                    pass
        if self._ranks.is_first:
            files.write_json(self._folder / "weights.json", found)

    def _shared(self, number: int) -> int:
        """Rank 0's number, on every rank: the folder may change between their reads."""
        data = str(int(number)).encode() if self._ranks.is_first else None
        return int(share_bytes(data, self._ranks, self._engine.device))


def differences(weights: Iterable[tuple[str, torch.Tensor]], folder: Path) -> dict[str, Any]:
    """`tensors`: their number; `different`: those that differ in the folder's safetensors.

    Compared bit for bit; the value is the greatest absolute difference, or None where shape or dtype differ.
    """
    count = 0
    different: dict[str, float | None] = {}
    with contextlib.ExitStack() as stack:
        shards = [stack.enter_context(safe_open(path, "pt")) for path in sorted(folder.glob("*.safetensors"))]
        of_name = {name: shard for shard in shards for name in shard.keys()}  # noqa: SIM118
        for name, tensor in weights:
            count += 1
            mine = of_name.pop(name).get_tensor(name) if name in of_name else None
            ours = tensor.detach().to("cpu")
            if mine is None or mine.shape != ours.shape or mine.dtype != ours.dtype:
                different[name] = None
            elif not torch.equal(_bits(mine), _bits(ours)):
                different[name] = float((mine.double() - ours.double()).abs().max())
        different.update(dict.fromkeys(of_name))
    return {"tensors": count, "different": different}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers: NaN equals itself, and -0 is not 0."""
    return tensor.contiguous().view(_WORDS[tensor.element_size()])


def refuse_rollbacks(noted: dict[int, dict[str, Any]], begin: int, last: int, before: int) -> None:
    """Refuse steps after a rollback: they continued from an older version, which log and ledger do not record.

    `noted`: the run's records of its steps; `before`: number of the newest rollback applied to the weights of `begin`.
    """
    for step in range(begin + 1, last + 1):
        rollback = noted.get(step, {}).get("rollback", before)
        if rollback != before:
            where = f"the checkpoint of step {begin}" if begin else "the run's base model"
            raise InvalidInput(
                "replay_to",
                f"is {last}; rollback {max(rollback, before)} lies between {where}, where the replay would begin, and "
                f"step {step}. Steps can be trained again up to the rollback, or from a checkpoint after it",
            )


def _noted(job_dir: Path) -> dict[int, dict[str, Any]]:
    """The run's record of each step, from the last time it trained the step."""
    found: dict[int, dict[str, Any]] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (job_dir / "monitor" / "batches.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):  # a line that a crash cut off
                entry = json.loads(line)
                found[entry["step"]] = entry
    return found


def _schedule_ends(job_dir: Path) -> dict[int, int]:
    """For each step, the run's planned last step at that time."""
    return {step: entry.get("last_step", 0) for step, entry in _noted(job_dir).items()}
