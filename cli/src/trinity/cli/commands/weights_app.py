"""`trinity weights ...`: the command line of weights.py and rollback.py."""

import sys
from typing import Annotated

import typer

from trinity.cli.options import AsJson, JobOption, RunOption, StageOption, Version

weights = typer.Typer(help="The weight versions of a live run.", no_args_is_help=True)


@weights.command("list")
def list_weights(
    config: RunOption = None,
    job: JobOption = None,
    stage: StageOption = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most this many, newest first")] = 20,
    as_json: AsJson = False,
) -> None:
    """List versions, newest first: step, state, who serves them, size, transports, canary, age."""
    from trinity.cli.commands.reader import run_on_stage
    from trinity.cli.commands.weights import list_versions

    sys.exit(run_on_stage(config, job, stage, lambda job_stage: list_versions(job_stage, limit, as_json)))


@weights.command("show")
def show_weights(
    version: Version,
    config: RunOption = None,
    job: JobOption = None,
    stage: StageOption = "",
    as_json: AsJson = False,
) -> None:
    """Show one version: transports, tensors and canary measurements."""
    from trinity.cli.commands.reader import run_on_stage
    from trinity.cli.commands.weights import show_version

    sys.exit(run_on_stage(config, job, stage, lambda job_stage: show_version(job_stage, version, as_json)))


@weights.command("pin")
def pin_weights(
    version: Version,
    config: RunOption = None,
    job: JobOption = None,
    stage: StageOption = "",
    as_json: AsJson = False,
) -> None:
    """Keep a version's files until it is unpinned."""
    from trinity.cli.commands.reader import run_on_stage
    from trinity.cli.commands.weights import pin_version

    sys.exit(run_on_stage(config, job, stage, lambda job_stage: pin_version(job_stage, version, True, as_json)))


@weights.command("unpin")
def unpin_weights(
    version: Version,
    config: RunOption = None,
    job: JobOption = None,
    stage: StageOption = "",
    as_json: AsJson = False,
) -> None:
    """Let a version's files be deleted once they are not needed."""
    from trinity.cli.commands.reader import run_on_stage
    from trinity.cli.commands.weights import pin_version

    sys.exit(run_on_stage(config, job, stage, lambda job_stage: pin_version(job_stage, version, False, as_json)))


@weights.command("rollback")
def roll_weights_back(
    version: Annotated[int, typer.Argument(min=0, help="An older version that was LIVE")],
    keep_experience: Annotated[
        bool, typer.Option("--keep-experience", help="Train what the withdrawn versions sampled all the same")
    ] = False,
    reason: Annotated[str, typer.Option("--reason", help="Why, for the record")] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")] = False,
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for explorers and the buffer")] = 300.0,
    config: RunOption = None,
    job: JobOption = None,
    stage: StageOption = "",
    as_json: AsJson = False,
) -> None:
    """Make an older version LIVE again, on every explorer and in the trainer, and withdraw all newer ones."""
    from trinity.cli.commands.reader import run_on_stage
    from trinity.cli.commands.rollback import RollbackRequest, roll_back

    request = RollbackRequest(version, keep_experience, reason, yes, wait, as_json)
    sys.exit(run_on_stage(config, job, stage, lambda job_stage: roll_back(job_stage, request)))
