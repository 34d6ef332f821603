"""How commands are declared: the options that several of them have, and how each of them ends."""

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="The run's YAML; or give it as the first argument")
]
RunOption = Annotated[Path | None, typer.Option("--config", "-c", help="The run's YAML")]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[YAML] [KEY.PATH=VALUE]...", help="Values over the YAML's")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="What to change")]
PluginDirs = Annotated[
    list[Path] | None,
    typer.Option("--plugin-dir", help="Folder with reward functions and workflows; may be given several times"),
]
JobOption = Annotated[Path | None, typer.Option("--job", help="Job folder of the run")]
StageOption = Annotated[
    str, typer.Option("--stage", help="Stage of the job; else the live one, or the last that was trained")
]
NatsOption = Annotated[
    str, typer.Option("--nats", help="NATS of a live run, from any machine; with --run else TRINITY_NATS_URL")
]
RunName = Annotated[str, typer.Option("--run", help="Name or id of a live run on that NATS; else the only one there")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON")]

_Command = TypeVar("_Command", bound=Callable[..., "str | int"])


def group(help: str = "") -> typer.Typer:
    """An app for one command or, with `help`, for several below its name."""
    return typer.Typer(help=help, no_args_is_help=bool(help), add_completion=False)


def command(app: typer.Typer, name: str, find: Callable[..., Any] | None = None) -> Callable[[_Command], _Command]:
    """Declare a function as a command: what it returns is printed, or is the exit code; `ending_well` says the rest.

    With `find`, the command has the options of `find` too, and gets what that finds as its first argument. Tests call
    the function itself.
    """

    def declare(function: _Command) -> _Command:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[find is not None :]
        common = list(inspect.signature(find, eval_str=True).parameters.values()) if find else []

        @functools.wraps(function)
        def run(**options: Any) -> None:
            from trinity.cli.errors import ending_well

            def action() -> int:
                given = {parameter.name: options.pop(parameter.name) for parameter in common}
                found = function(*([find(**given)] if find else []), **options)
                if isinstance(found, str):
                    print(found)
                return found if isinstance(found, int) else 0

            sys.exit(ending_well(action))

        by_name = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *common)]
        run.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
        app.command(name)(run)
        return function

    return declare
