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
from trinity.trainer.data import quarantine
from trinity.trainer.data.bad_steps import BadStep
from trinity.trainer.engine import TrainEngine
from trinity.trainer.engine.checkpoints import CheckpointStore
from trinity.trainer.engine.step import StepTrainer
from trinity.trainer.process.exchange import Exchange


def train(plan: Plan, step: int, folder: Path, engine: TrainEngine, exchange: Exchange) -> None:
    """Every rank reads the stored batch itself. The report goes to `folder`."""
    last_step = plan.total_steps or step
    try:
        raw = quarantine.read_batch(plan.job_dir, step)
    except FileNotFoundError:
        where = quarantine.folder_of(plan.job_dir, step)
        raise InvalidInput("replay_bad_step", f"is {step}; {where} keeps no batch") from None
    store = CheckpointStore(plan.job_dir)
    begin = max((saved for saved in store.steps() if saved < step), default=0)
    if begin:
        store.load(begin, engine, exchange, unverified=plan.config.allow_unverified_checkpoint)
    report: dict[str, Any] = {"step": step, "checkpoint_step": begin, "problem": "", "groups": [], "metrics": {}}
    try:
        batch = StepTrainer(plan, engine, exchange.is_first, folder, lambda _: last_step).decode(raw)
        report["groups"] = quarantine.named(raw, engine.per_group_stats(batch))
        report["metrics"] = engine.train(batch, last_step)
    except BadStep as error:
        report |= {"problem": error.problem, "blamed": error.groups}
    if exchange.is_first:
        files.write_json(folder / "report.json", report)
