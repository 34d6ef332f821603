"""Trains steps of a run again, from the same checkpoint, ledger entries and log; or the stored batch of a bad step.

    load the run's checkpoint before `first` -> (next -> train) up to `last` -> save -> compare

The loop is the run's, with these checkpoints. Nothing is published or committed; all output goes to a separate folder.
"""

import contextlib
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
from trinity.trainer.data import bad_steps
from trinity.trainer.data.bad_steps import BadStep
from trinity.trainer.engine import TrainEngine
from trinity.trainer.engine.checkpoint_store import CheckpointStore
from trinity.trainer.engine.checkpoints import Checkpoints
from trinity.trainer.engine.step import StepTrainer
from trinity.trainer.engine.weights import read_all
from trinity.trainer.process.exchange import Exchange

log = structlog.get_logger(__name__)

_NOTED = ("last_step", "rollback")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class ReplayCheckpoints:
    """Resumes from the run's checkpoint, saves another after step `last`, and compares it with the run's.

    The replay also trains the steps between the checkpoint and `first`.
    """

    plan: Plan
    folder: Path
    first: int
    last: int
    own: Checkpoints

    def __post_init__(self) -> None:
        self._of_the_run = CheckpointStore.of(self.plan, self.own.run)
        self._notes = notes(self.plan.job_dir)

    def resume(self) -> tuple[int, int]:
        """Loads the run's newest checkpoint before the first step; without one the base model stays loaded."""
        begin = max((step for step in self._of_the_run.steps() if step < self.first), default=0)
        begin = self.own.exchange.share(begin)  # the folder may change between the ranks' reads
        state = self._of_the_run.state(begin) if begin else None
        refuse_rollbacks(self._notes, begin, self.last, state.rollback if state else 0)
        if begin:
            self._load(begin)
        elif self.first > 1:
            raise InvalidInput("replay_from", f"is {self.first}; the run keeps no checkpoint of a step before")
        self.own.control.update(checkpoint_step=begin, saved_step=begin)
        log.info("trainer.replay.began", checkpoint_step=begin, first=self.first, last=self.last)
        return begin, 0

    def _load(self, step: int) -> None:
        unverified = self.plan.config.allow_unverified_checkpoint
        self._of_the_run.load(step, self.own.engine, self.own.exchange, unverified=unverified)

    def schedule_end(self, step: int) -> int:
        """The run's planned last step at the time of this step; a run may be extended later."""
        return self._notes.get(step, {}).get("last_step", 0) or self.plan.total_steps or self.last

    def save(self, step: int) -> None:
        self.own.save(step)

    def settle(self) -> None:
        self.own.settle()

    def save_if_due(self, step: int) -> None:
        if step == self.last:
            self.save(step)
            self.settle()
            self._compare(step)

    def _compare(self, step: int) -> None:
        """Compares the weights with the run's checkpoint of the step, if it exists, by loading that into the engine."""
        found: dict[str, Any] = {"step": step, "compared": self.own.exchange.share(step in self._of_the_run.steps())}
        if found["compared"]:
            self._load(step)
            if self.own.exchange.is_first:  # in the form of the saved file
                _, weights = self.own.engine.weights.whole()
                found |= differences(weights, self.own.store.path(step) / "actor" / "huggingface")
                log.info("trainer.replay.compared", step=step, different=len(found["different"]))
            else:
                read_all(self.own.engine.weights.read())
        if self.own.exchange.is_first:
            files.write_json(self.folder / "weights.json", found)


def differences(weights: Iterable[tuple[str, torch.Tensor]], folder: Path) -> dict[str, Any]:
    """Compares weights bit for bit with the folder's safetensors.

    Returns the number of `tensors`, and in `different` the greatest absolute difference of each tensor that differs;
    None if shape or dtype differ.
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
    """Views a tensor as integers: NaN equals itself, and -0 differs from 0."""
    return tensor.contiguous().view(_WORDS[tensor.element_size()])


def refuse_rollbacks(noted: dict[int, dict[str, Any]], begin: int, last: int, before: int) -> None:
    """Refuses steps after a rollback: they continued from an older version, which log and ledger do not record.

    noted: the run's records of its steps. before: number of the newest rollback applied to the weights of `begin`.
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


def notes(job_dir: Path) -> dict[int, dict[str, Any]]:
    """Reads from monitor/batches.jsonl the fields of each step that a replay needs; its last line counts."""
    found: dict[int, dict[str, Any]] = {}
    with contextlib.suppress(FileNotFoundError):
        for entry in files.json_lines((job_dir / "monitor" / "batches.jsonl").read_bytes().splitlines()):
            if type(entry.get("step")) is int:
                found[entry["step"]] = {name: entry[name] for name in _NOTED if type(entry.get(name)) is int}
    return found


def train_bad_step(plan: Plan, run: str, step: int, folder: Path, engine: TrainEngine, exchange: Exchange) -> None:
    """Trains the stored batch of a bad step again, and writes statistics of each of its groups to `folder`/report.json.

    Loads the newest checkpoint before the step, and does not train the steps between them: a run that stopped at a bad
    step has saved a checkpoint just before it. Every rank reads the stored batch itself.
    """
    last_step = plan.total_steps or step
    try:
        raw = bad_steps.read_batch(plan.job_dir, step)
    except FileNotFoundError:
        where = bad_steps.folder_of(plan.job_dir, step)
        raise InvalidInput("replay_bad_step", f"is {step}; {where} keeps no batch") from None
    store = CheckpointStore.of(plan, run)
    begin = max((saved for saved in store.steps() if saved < step), default=0)
    if begin:
        store.load(begin, engine, exchange, unverified=plan.config.allow_unverified_checkpoint)
    report: dict[str, Any] = {"step": step, "checkpoint_step": begin, "problem": "", "groups": [], "metrics": {}}
    try:
        batch = StepTrainer(plan, engine, exchange.is_first, folder, lambda _: last_step).decode(raw)
        report["groups"] = bad_steps.with_names(raw, engine.per_group_stats(batch))
        report["metrics"] = engine.train(batch, last_step)
    except BadStep as error:
        report |= {"problem": error.problem, "blamed": error.groups}
    if exchange.is_first:
        files.write_json(folder / "report.json", report)
