"""`trinity replay-step`: train the kept batch of a bad step again, and show the effect of each group on the loss.

It works in <stage>/replay/step_<k>/, from the run's newest checkpoint before the step. Keys may be changed on the
command line, to see whether that mends the step.
"""

import asyncio
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from trinity.cli.supervise.processes import services
from trinity.commands import AsJson, Overrides, command, group
from trinity.config import dump
from trinity.config.run_record import Addresses
from trinity.lineage.replay import (
    Wanted,
    check_given,
    check_model,
    find_trained,
    new_folder,
    placement_of,
    run_to_end,
    trainer_config,
)
from trinity.reading.errors import RunError
from trinity.reading.reader import JobStage, has_own_tokens
from trinity.reading.render import table, to_json
from trinity.runtime import files
from trinity.weights.checkpoints import complete_steps

_COLUMNS = ("group", "task", "sequences", "tokens", "reward", "advantage", "loss", "ratio", "ratio_max")

app = group()


@command(app, "replay-step", find_trained)
def replay_step(
    job_stage: JobStage,
    step: Annotated[int | None, typer.Argument(min=1, help="A bad step; else the newest that was kept")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Train the kept batch of a bad step again, and show loss, advantage and ratio of each of its groups."""
    check_given(job_stage)
    steps = kept_steps(job_stage.folder)
    if not steps:
        raise RunError(
            f"{job_stage.name} keeps no batch of a bad step: there is none in {job_stage.folder / 'bad_steps'}"
            f"{'; --job names the job folder of the trainer' if job_stage.nats_url else ''}"
        )
    step = steps[-1] if step is None else step
    if step not in steps:
        raise RunError(f"step {step} was not kept; kept are {', '.join(map(str, steps))}", code=2)
    before = max((saved for saved in complete_steps(job_stage.folder) if saved < step), default=0)
    placement, threads = placement_of(job_stage, Wanted(step, step, before), {})
    config = trainer_config(job_stage, overrides or [])
    check_model(job_stage, config)
    folder = new_folder(job_stage.folder, f"step_{step}")
    config_file = folder / "trainer.config.json"
    files.write_json(config_file, dump(config), mode=0o600)
    settings = {"REPLAY_FOLDER": str(folder), "REPLAY_BAD_STEP": str(step)}
    settings |= {"THREADS": str(threads)} if threads else {}
    has_own_tokens(job_stage, "trainer", folder / "log")
    child = services.trainer(config_file, Addresses(buffer="127.0.0.1:1"), folder / "log", placement, settings)
    asyncio.run(run_to_end(child))
    report = files.read_json(folder / "report.json")
    if not isinstance(report, dict):
        raise RunError(f"the replay left no report: {child.last_error()} (see {child.log_file})")
    print(to_json(report) if as_json else f"{render(report)}\nresults: {folder / 'report.json'}")
    return 1 if report["problem"] else 0  # 0: the batch trains without a bad value now


def kept_steps(folder: Path) -> list[int]:
    """Returns the bad steps of a stage whose batch is kept, ascending."""
    found = (folder / "bad_steps").glob("step_*/batch.bin")
    return sorted(int(file.parent.name.removeprefix("step_")) for file in found)


def render(report: dict[str, Any]) -> str:
    """Returns the groups as a table, with non-finite values marked by `!`, and the metrics of training."""
    begin = report["checkpoint_step"]
    weights = f"the checkpoint of step {begin}" if begin else "the base model"
    columns: dict[str, Callable[[dict[str, Any]], Any]] = {"": lambda group: "" if group["finite"] else "!"}
    columns |= {name: partial(_cell, name) for name in _COLUMNS}
    verdict = f"problem: {report['problem']}" if report["problem"] else "it can be learnt from"
    return f"step {report['step']} with the weights of {weights}\n{table(report['groups'], columns)}\n{verdict}"


def _cell(column: str, group: dict[str, Any]) -> Any:
    if column == "task":
        return group.get("task_id") or f"row {group.get('row', '?')}"
    value = group[column]
    return f"{value:.5g}" if isinstance(value, float) and math.isfinite(value) else str(value)
