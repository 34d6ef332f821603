"""The trinity command."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from trinity.cli.commands.env_app import env
from trinity.cli.commands.weights_app import weights
from trinity.cli.options import (
    All,
    Arguments,
    AsJson,
    ConfigOption,
    JobOption,
    Ordinals,
    PluginDirs,
    RunOption,
    StageOption,
)
from trinity.runtime.version import installed_version

app = typer.Typer(
    help="Reinforcement fine-tuning of language models as services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

deadletters = typer.Typer(help="Tasks that failed for good.", no_args_is_help=True)
batch = typer.Typer(help="What a step learns from, out of the ledger.", no_args_is_help=True)
app.add_typer(deadletters, name="deadletters")
app.add_typer(batch, name="batch")
app.add_typer(weights, name="weights")
app.add_typer(env, name="env")


def _version(value: bool) -> None:
    if value:
        typer.echo(installed_version("trinity-cli"))
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version")
    ] = False,
) -> None:
    """Reinforcement fine-tuning of language models as services."""


@app.command()
def run(
    arguments: Arguments = None,
    config: ConfigOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and show the plan; start nothing")] = False,
    plugin_dir: PluginDirs = None,
) -> None:
    """Run what a YAML describes, or resume where it stopped."""
    from trinity.cli.commands.run import check_command, request, run_command

    asked = request(config, arguments, plugin_dir)
    sys.exit(check_command(asked, as_json=False, deep=False) if dry_run else run_command(asked))


@app.command()
def check(
    arguments: Arguments = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the resolved configuration")] = False,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Look at model, data and this machine too; exit code 2 if it cannot run here"),
    ] = False,
    plugin_dir: PluginDirs = None,
) -> None:
    """Check a YAML and say what it would do. Needs no GPU, no network, no model and no data."""
    from trinity.cli.commands.run import check_command, request

    sys.exit(check_command(request(config, arguments, plugin_dir), as_json=as_json, deep=deep))


@app.command()
def status(config: RunOption = None, job: JobOption = None, as_json: AsJson = False) -> None:
    """Show the processes of a live run, or how a finished one ended. Without options: the newest one here."""
    from trinity.cli.commands.run import status_command

    sys.exit(status_command(config, job, as_json))


@app.command()
def log(
    service: Annotated[str, typer.Argument(help="One process, as explorer; empty: all of them")] = "",
    config: RunOption = None,
    job: JobOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue as lines are written")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines to begin with")] = 50,
    level: Annotated[str, typer.Option("--level", help="Least level: debug, info, warning, error")] = "info",
) -> None:
    """Show the log of a run, all processes in the order of time."""
    from trinity.cli.commands.run import log_command

    sys.exit(log_command(config, job, service, lines, follow, level))


@app.command()
def view(
    config: RunOption = None,
    job: JobOption = None,
    step: Annotated[
        int | None, typer.Option("--step", help="Experience of this optimizer step; else the newest")
    ] = None,
    index: Annotated[int | None, typer.Option("--index", "-i", help="Show one of them whole, by its number")] = None,
    task: Annotated[str, typer.Option("--task", help="Those whose task id contains this")] = "",
    as_json: AsJson = False,
) -> None:
    """Show the experiences that were trained: reward, advantage and the versions that sampled them."""
    from trinity.cli.commands.run import view_command

    sys.exit(view_command(config, job, step, index, task, as_json))


@deadletters.command("list")
def list_letters(
    config: RunOption = None,
    job: JobOption = None,
    stage: StageOption = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most this many, oldest first")] = 100,
    as_json: AsJson = False,
) -> None:
    """List dead letters: ordinal, task, cause, attempts and error."""
    from trinity.cli.commands import dead_letters as letters
    from trinity.cli.commands.reader import run_on_stage

    sys.exit(run_on_stage(config, job, stage, lambda job_stage: letters.list_letters(job_stage, limit, as_json)))


@deadletters.command("show")
def show_letter(
    ordinal: Annotated[int, typer.Argument(min=1, help="The task, by its ordinal")],
    config: RunOption = None,
    job: JobOption = None,
    stage: StageOption = "",
    as_json: AsJson = False,
) -> None:
    """Show one dead letter with all its fields and the row of its task."""
    from trinity.cli.commands import dead_letters as letters
    from trinity.cli.commands.reader import run_on_stage

    sys.exit(run_on_stage(config, job, stage, lambda job_stage: letters.show_letter(job_stage, ordinal, as_json)))


@deadletters.command("retry")
def retry_letters(
    ordinals: Ordinals = None,
    everything: All = False,
    config: RunOption = None,
    job: JobOption = None,
    stage: StageOption = "",
    as_json: AsJson = False,
) -> None:
    """Requeue tasks of dead letters with all their attempts. The run must be live."""
    from trinity.cli.commands import dead_letters as letters
    from trinity.cli.commands.reader import run_on_stage

    change = letters.Change("retry", ordinals or [], everything)
    sys.exit(run_on_stage(config, job, stage, lambda job_stage: letters.change_letters(job_stage, change, as_json)))


@deadletters.command("drop")
def drop_letters(
    ordinals: Ordinals = None,
    everything: All = False,
    config: RunOption = None,
    job: JobOption = None,
    stage: StageOption = "",
    as_json: AsJson = False,
) -> None:
    """Delete dead letters; their tasks are not retried. The run must be live."""
    from trinity.cli.commands import dead_letters as letters
    from trinity.cli.commands.reader import run_on_stage

    change = letters.Change("drop", ordinals or [], everything)
    sys.exit(run_on_stage(config, job, stage, lambda job_stage: letters.change_letters(job_stage, change, as_json)))


@batch.command("show")
def show_batch(
    step: Annotated[int, typer.Argument(min=1, help="Optimizer step")],
    config: RunOption = None,
    job: JobOption = None,
    stage: StageOption = "",
    texts: Annotated[
        int, typer.Option("--texts", min=0, help="Show the prompt and at most this many responses of every group")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Show the groups (or rows) that a step consumed, and those that were dropped before it."""
    from trinity.cli.commands.batch import show_batch
    from trinity.cli.commands.reader import run_on_stage

    sys.exit(run_on_stage(config, job, stage, lambda job_stage: show_batch(job_stage, step, texts, as_json)))


@batch.command("skip")
def skip_batch(
    step: Annotated[int, typer.Argument(min=1, help="Optimizer step")],
    reason: Annotated[str, typer.Option("--reason", help="Why; it is kept in the ledger")],
    config: RunOption = None,
    job: JobOption = None,
    stage: StageOption = "",
) -> None:
    """Pass a step that the trainer cannot learn from, when the run continues and in every replay."""
    from trinity.cli.commands.batch import skip_batch
    from trinity.cli.commands.reader import run_on_stage

    sys.exit(run_on_stage(config, job, stage, lambda job_stage: skip_batch(job_stage, step, reason)))


@app.command()
def explorers(
    config: RunOption = None, job: JobOption = None, stage: StageOption = "", as_json: AsJson = False
) -> None:
    """List the explorers of a live run: state, weights, lag, tokens a second, how weights reach them."""
    from trinity.cli.commands.explorers import list_explorers
    from trinity.cli.commands.reader import run_on_stage

    sys.exit(run_on_stage(config, job, stage, lambda job_stage: list_explorers(job_stage, as_json)))


@app.command()
def replay(
    from_step: Annotated[int, typer.Option("--from-step", min=1, help="First step")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="What to change")] = None,
    to_step: Annotated[int | None, typer.Option("--to-step", min=1, help="Last step; else the newest")] = None,
    config: RunOption = None,
    job: JobOption = None,
    stage: StageOption = "",
    as_json: AsJson = False,
) -> None:
    """Train steps again from the ledger, and compare with what the run did."""
    from trinity.cli.commands.reader import run_on_stage
    from trinity.cli.commands.replay import replay

    sys.exit(
        run_on_stage(
            config, job, stage, lambda job_stage: replay(job_stage, from_step, to_step, arguments or [], as_json)
        )
    )


@app.command()
def results(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FOLDER]...", help="Job folders, or ones that hold them; ./checkpoints"),
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", "-m", help="Evaluation metric; may be given several times")
    ] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the table here, too")] = None,
    as_csv: Annotated[Path | None, typer.Option("--csv", help="Write it here as CSV")] = None,
    curves: Annotated[
        Path | None, typer.Option("--curves", help="Write every point of every curve here as CSV")
    ] = None,
) -> None:
    """Collect the evaluations of many runs: first, best and last value of each metric, in one table."""
    from trinity.cli.commands.results import results
    from trinity.cli.errors import ending_well

    sys.exit(ending_well(lambda: results(folders or [], metric or [], markdown, as_csv, curves)))


@app.command("replay-step")
def replay_step(
    step: Annotated[int | None, typer.Argument(min=1, help="A bad step; else the newest that was kept")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="What to change")] = None,
    config: RunOption = None,
    job: JobOption = None,
    stage: StageOption = "",
    as_json: AsJson = False,
) -> None:
    """Train the kept batch of a bad step again, and show loss, advantage and ratio of each of its groups."""
    from trinity.cli.commands.reader import run_on_stage
    from trinity.cli.commands.replay_step import replay_step

    sys.exit(run_on_stage(config, job, stage, lambda job_stage: replay_step(job_stage, step, arguments or [], as_json)))


@app.command()
def convert(
    checkpoint_dir: Annotated[
        Path, typer.Option("--checkpoint-dir", "-c", help="Job folder, global_step folder, or anything inside one")
    ],
    base_model_dir: Annotated[
        Path | None, typer.Option("--base-model-dir", "-b", help="Where config.json is taken from if it is missing")
    ] = None,
    steps: Annotated[str | None, typer.Option("--steps", "-s", help="These steps alone, as 100,200")] = None,
) -> None:
    """Turn checkpoints (DeepSpeed, or FSDP as veRL writes them) into Hugging Face folders."""
    from trinity.cli.convert import convert_command

    sys.exit(convert_command(checkpoint_dir, base_model_dir, steps))


@app.command("import-verl")
def import_verl(
    script: Annotated[Path, typer.Argument(help="Script that runs verl.trainer.main_ppo")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The YAML; else standard output")] = None,
) -> None:
    """Write the YAML of what a veRL script runs."""
    from trinity.cli.import_verl import import_verl_command

    sys.exit(import_verl_command(script, output))


if __name__ == "__main__":
    app()
