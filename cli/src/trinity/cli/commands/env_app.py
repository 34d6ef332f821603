"""`trinity env ...`: what concerns providers of environments."""

import asyncio
import json
import sys
from typing import Annotated

import typer

from trinity.cli.options import AsJson

env = typer.Typer(help="Providers of environments.", no_args_is_help=True)


@env.callback()
def root() -> None:
    """Providers of environments."""


@env.command("check")
def check_env(
    address: Annotated[str, typer.Argument(help="gRPC address of the provider, host:port")],
    name: Annotated[str, typer.Option("--name", "-n", help="This environment or scorer alone; else all")] = "",
    task: Annotated[str, typer.Option("--task", help="The task's row that is played, a JSON object")] = "{}",
    args: Annotated[str, typer.Option("--args", help="Environment arguments, a JSON object")] = "",
    action: Annotated[str, typer.Option("--action", help="Text of every action")] = "look",
    max_steps: Annotated[int, typer.Option("--max-steps", min=1, help="Actions of an episode at most")] = 20,
    as_json: AsJson = False,
) -> None:
    """Check that a provider keeps the contract of docs/environments.md. Exit code 1 if it does not."""
    from trinity.cli.commands.env_check import check

    for option, text in (("--task", task), ("--args", args or "{}")):
        _object(option, text)
    sys.exit(asyncio.run(check(address, name, task, args, action, max_steps, as_json)))


def _object(option: str, text: str) -> None:
    try:
        if isinstance(json.loads(text), dict):
            return
        problem = "is no JSON object"
    except ValueError as error:
        problem = f"is no JSON: {error}"
    typer.echo(f'{option}: {problem}; give one as \'{{"question": "6 x 7?"}}\'', err=True)
    sys.exit(2)
