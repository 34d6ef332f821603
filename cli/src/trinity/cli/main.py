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

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The run's YAML", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.path=value, over the YAML", show_default=False)]


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
def run(config: ConfigOption, overrides: Overrides = None) -> None:
    """Run what a YAML describes, or go on where it stopped."""
    from trinity.cli.commands import run_command

    sys.exit(run_command(config, overrides or []))


@app.command()
def check(
    config: ConfigOption,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the resolved configuration")] = False,
) -> None:
    """Check a YAML and say what it would do. Needs no GPU, no model and no data."""
    from trinity.cli.commands import check_command

    sys.exit(check_command(config, overrides or [], as_json))


@app.command()
def status(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML of the run", show_default=False)] = None,
    job: Annotated[Path | None, typer.Option("--job", help="Job folder of the run", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON")] = False,
) -> None:
    """Show the processes of a live run. Without options: the newest one below ./checkpoints."""
    from trinity.cli.commands import status_command

    sys.exit(status_command(config, job, as_json))


if __name__ == "__main__":
    app()
