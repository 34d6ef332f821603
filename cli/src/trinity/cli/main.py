"""The trinity command. A command's module is imported when the command is called, so --help answers at once."""

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from trinity.cli import satellites
from trinity.commands import use_given_identity
from trinity.runtime.version import installed_version

# The module below trinity.cli whose `app` is the command or the group of commands, and its line in --help.
_COMMANDS = {
    "run": ("commands.run", "Run what a YAML describes, or train --model on --data; resume where it stopped."),
    "check": ("commands.check", "Check a YAML and say what it would do. Needs no GPU, no network, no model, no data."),
    "status": ("commands.status", "Show the processes of a live run, or how a finished one ended."),
}


# Groups of --help, in the order in which they are shown; a command in none of them is in the last one.
_GROUPS = {
    "Run": ("init", "run", "serve", "tinker", "check", "debug", "launch"),
    "Watch": ("status", "log", "view", "results", "explorers", "cost", "ui"),
    "Explain": ("batch", "fork", "regrade", "replay", "replay-step", "bisect", "compare", "provenance", "verify"),
    "Repair": ("deadletters", "weights"),
    "Admin": ("env", "certs", "convert", "export", "atif", "import-verl"),
}
_ORDER = [name for names in _GROUPS.values() for name in names]

_MODES = ("bench", "both", "explore", "train", "train_node")  # `serve` is a command, too


def _panel(name: str) -> str:
    return next((panel for panel, names in _GROUPS.items() if name in names), "Admin")


class _OnDemand(TyperGroup):
    """Lists its commands without importing them."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        # typer suggests one of these for a misspelt name.
        self.commands = {name: TyperCommand(name) for name in [*_COMMANDS, *satellites.names()]}

    def list_commands(self, ctx: Any) -> list[str]:
        known = {*_COMMANDS, *satellites.names()}
        return [*(name for name in _ORDER if name in known), *sorted(known.difference(_ORDER))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        line = _COMMANDS[cmd_name][1] if cmd_name in _COMMANDS else satellites.help_of(cmd_name)
        return TyperCommand(cmd_name, help=line, rich_help_panel=_panel(cmd_name)) if line is not None else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in _MODES:
            ctx.fail(f"No such command '{args[0]}'; it is a mode: trinity run FILE mode={args[0]}")
        name, _, rest = super().resolve_command(ctx, args)
        found = typer.main.get_command(_load(str(name)))
        found.name = name
        return name, found, rest


def _load(name: str) -> Any:
    """The app of a command. Ends the process with exit code 2 if the command's distribution is not installed."""
    if name in _COMMANDS:
        return importlib.import_module(f"trinity.cli.{_COMMANDS[name][0]}").app
    try:
        return satellites.load(name)
    except satellites.NotInstalled as error:
        print(f"trinity: {error}", file=sys.stderr)
        sys.exit(2)


app = typer.Typer(cls=_OnDemand, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _version(value: bool) -> None:
    if value:
        typer.echo(installed_version("trinity-cli"))
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version")
    ] = False,
) -> None:
    """Reinforcement fine-tuning of language models as services."""
    if context.invoked_subcommand != "certs":  # which makes such folders
        use_given_identity()


if __name__ == "__main__":
    app()
