"""Trains the stored batch of a bad step again, in a separate folder, to report statistics of each of its groups.

    load the run's newest checkpoint before the step -> statistics of every group -> train -> report.json

Steps between that checkpoint and the bad one are not trained again: the weights are those of `checkpoint_step`, which a
run that stopped at a bad step has written just before it.
"""

from pathlib import Path
from typing import Any

from trinity.config import Plan
from trinity.runtime import files
from trinity.runtime.errors import InvalidInput
from trinity.trainer.checkpoints import CheckpointStore
from trinity.trainer.control import Control
from trinity.trainer.data import kept
from trinity.trainer.data.bad_steps import BadStep
from trinity.trainer.engine import TrainEngine
from trinity.trainer.loop import TrainLoop
from trinity.trainer.ranks import Ranks


class KeptStepLoop(TrainLoop):
    """`run` once. Every rank reads the stored batch itself."""

    def __init__(
        self, plan: Plan, run: str, ranks: Ranks, engine: TrainEngine, control: Control, step: int, folder: Path
    ) -> None:
        super().__init__(plan, run, ranks, engine, control, None, None, folder)
        self._bad_step = step

    def run(self) -> None:
        step, job = self._bad_step, self._plan.job_dir
        try:
            raw = kept.read_batch(job, step)
        except FileNotFoundError:
            raise InvalidInput("replay_kept", f"is {step}; {kept.folder_of(job, step)} keeps no batch") from None
        store = CheckpointStore(job)
        begin = max((saved for saved in store.steps() if saved < step), default=0)
        if begin:
            self._engine.load(store.path(begin) / "actor")
        self._last_step = self._plan.total_steps or step
        report: dict[str, Any] = {"step": step, "checkpoint_step": begin, "problem": "", "groups": [], "metrics": {}}
        try:
            batch = self._batch(raw)
            report["groups"] = kept.named(raw, self._engine.per_group_stats(batch))
            report["metrics"] = self._engine.train(batch, self._schedule_end(step))
        except BadStep as error:
            report |= {"problem": error.problem, "blamed": error.groups}
        if self._ranks.is_first:
            files.write_json(self._folder / "report.json", report)
        self._control.update(step=step, state="finished", waiting_for="")
