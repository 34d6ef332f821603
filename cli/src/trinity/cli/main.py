"""The trinity command."""

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Reinforcement fine-tuning of language models as services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="The run's YAML; or give it as the first argument")
]
RunOption = Annotated[Path | None, typer.Option("--config", "-c", help="The run's YAML")]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[YAML] [KEY.PATH=VALUE]...", help="Values over the YAML's")
]
PluginDirs = Annotated[
    list[Path] | None,
    typer.Option("--plugin-dir", help="Folder with reward functions and workflows; may be given several times"),
]
JobOption = Annotated[Path | None, typer.Option("--job", help="Job folder of the run")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON")]


def _version(value: bool) -> None:
    if value:
        typer.echo(importlib.metadata.version("trinity-cli"))
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
    """Run what a YAML describes, or go on where it stopped."""
    from trinity.cli.commands import check_command, request, run_command

    asked = request(config, arguments, plugin_dir)
    sys.exit(check_command(asked, as_json=False, deep=False) if dry_run else run_command(asked))


@app.command()
def check(
    arguments: Arguments = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the resolved configuration")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Look at the model and the data as well")] = False,
    plugin_dir: PluginDirs = None,
) -> None:
    """Check a YAML and say what it would do. Needs no GPU, no network, no model and no data."""
    from trinity.cli.commands import check_command, request

    sys.exit(check_command(request(config, arguments, plugin_dir), as_json=as_json, deep=deep))


@app.command()
def status(config: RunOption = None, job: JobOption = None, as_json: AsJson = False) -> None:
    """Show the processes of a live run, or how a finished one ended. Without options: the newest one here."""
    from trinity.cli.commands import status_command

    sys.exit(status_command(config, job, as_json))


@app.command()
def log(
    service: Annotated[str, typer.Argument(help="One process, as explorer; empty: all of them")] = "",
    config: RunOption = None,
    job: JobOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines are written")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines to begin with")] = 50,
    level: Annotated[str, typer.Option("--level", help="Least level: debug, info, warning, error")] = "info",
) -> None:
    """Show the log of a run, all processes in the order of time."""
    from trinity.cli.commands import log_command

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
    """Show what was learnt from: experiences with reward, advantage and the weights that sampled them."""
    from trinity.cli.commands import view_command

    sys.exit(view_command(config, job, step, index, task, as_json))


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
