"""Declares commands: the options that several of them share, and how each of them ends."""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="The run's YAML; or give it as the first argument")
]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[YAML] [KEY.PATH=VALUE]...", help="Values over the YAML's")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="What to change")]
PluginDirs = Annotated[
    list[Path] | None,
    typer.Option("--plugin-dir", help="Folder with reward functions and workflows; may be given several times"),
]
ModelOption = Annotated[str, typer.Option("--model", help="The model's folder or hub name")]
DataOption = Annotated[str, typer.Option("--data", help="A file of rows, its folder, or a hub name")]
SubsetOption = Annotated[str, typer.Option("--subset", help="Subset of a hub dataset, or a folder inside --data")]
PromptOption = Annotated[str, typer.Option("--prompt", help="The column of prompts; else guessed")]
AnswerOption = Annotated[str, typer.Option("--answer", help="The column of right answers; else guessed")]
AlgorithmOption = Annotated[str, typer.Option("--algorithm", help="grpo, sft or dpo; else as the columns suggest")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON")]

# The options that name a run, by the parameters of the functions in trinity.reading that find it.
RunOption = Annotated[Path | None, typer.Option("--config", "-c", help="The run's YAML")]
JobOption = Annotated[Path | None, typer.Option("--job", help="Job folder of the run")]
StageOption = Annotated[
    str, typer.Option("--stage", help="Stage of the job; else the live one, or the last that was trained")
]
NatsOption = Annotated[
    str, typer.Option("--nats", help="NATS of a live run, from any machine; with --run else TRINITY_NATS_URL")
]
RunName = Annotated[str, typer.Option("--run", help="Name or id of a live run on that NATS; else the only one there")]
_FINDING: dict[str, Any] = {
    "config": RunOption, "job": JobOption, "stage": StageOption, "nats": NatsOption, "run": RunName,
}  # fmt: skip

# Settings that name the files of an identity, as `trinity certs` writes them.
_IDENTITY_FILES = {
    "TLS_CERT": "tls.crt", "TLS_KEY": "tls.key", "TLS_CA": "ca.crt", "NATS_CREDS": "nats.creds", "NATS_CA": "ca.crt",
}  # fmt: skip

_LARGEST = 2**31 - 1  # a number that a service can be asked for

_Command = TypeVar("_Command", bound=Callable[..., "str | int"])


def group(help: str = "") -> typer.Typer:
    """Returns an app for one command or, with `help`, for a group of commands."""
    return typer.Typer(help=help, no_args_is_help=bool(help), add_completion=False)


def command(app: typer.Typer, name: str, find: Callable[..., Any] | None = None) -> Callable[[_Command], _Command]:
    """Declares a function as a command. A string that it returns is printed, a number is the exit code.

    `find` locates the run: the command gets its result as first argument, and an option for each of its parameters.
    Errors end the command as `ending_well` says. Tests call the function itself.
    """

    def declare(function: _Command) -> _Command:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[find is not None :]
        common = [
            parameter.replace(annotation=_FINDING.get(parameter.name, parameter.annotation))
            for parameter in (inspect.signature(find, eval_str=True).parameters.values() if find else ())
        ]

        @functools.wraps(function)
        def run(**options: Any) -> None:
            from trinity.reading.errors import RunError, ending_well

            def action() -> int:
                for given_name, value in options.items():
                    if isinstance(value, int) and abs(value) > _LARGEST:
                        raise RunError(f"{given_name} {value}: give a number up to {_LARGEST}", 2)
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


def use_given_identity() -> None:
    """Uses the identity that TRINITY_IDENTITY names, if it is set. Raises typer.BadParameter as `use_identity`."""
    if folder := os.environ.get("TRINITY_IDENTITY"):
        use_identity(Path(folder).absolute())


def use_identity(folder: Path) -> None:
    """Sets the settings for the certificates and NATS credentials in a folder, except those already set.

    The folder is the one of `trinity certs`, or one identity in it: that of the machine's explorer or trainer, or of an
    operator.
    Raises typer.BadParameter if it is neither.
    """
    own = next((path for path in (folder, folder / "operator") if (path / "tls.crt").is_file()), None)
    if own is None:
        problem = f"{folder} holds neither tls.crt nor operator/tls.crt, as `trinity certs` writes them"
        raise typer.BadParameter(problem, param_hint="TRINITY_IDENTITY")
    from trinity.runtime.trust import ca

    holders = {"": own}
    if own == folder and (role := ca.role_of(own / "tls.crt")) in ("explorer", "trainer"):
        holders[f"{role.upper()}_"] = own
    for service in ("buffer", "environment", "explorer", "sync", "trainer"):
        if (folder / service).is_dir():
            holders[f"{service.upper()}_"] = folder / service
    if (folder / "nats" / "tls.crt").is_file():
        os.environ.setdefault("TRINITY_NATS_IDENTITY", str(folder / "nats"))
    for prefix, path in holders.items():
        for setting, name in _IDENTITY_FILES.items():
            if (path / name).is_file():
                os.environ.setdefault(f"TRINITY_{prefix}{setting}", str(path / name))
