"""The command line of every service process: `serve`, `health`, `settings`, `version`. Parse first, then import."""

import importlib
import json
import os
import sys
from typing import Any

import typer

from trinity.runtime.errors import EXIT_FOR_GOOD, InvalidInput, TrinityError
from trinity.runtime.settings import ServiceSettings, load_settings
from trinity.runtime.torch_builds import hide_unusable_companions
from trinity.runtime.version import installed_version


def service_app(
    name: str, summary: str, settings: type[ServiceSettings], service: str, refused: str = ""
) -> typer.Typer:
    """The app of one service; `service` is "package.module:Class", which only `serve` imports.

    `refused`: "package.module:function", which takes settings and yields the errors with which a start would end.
    """
    # OpenMP reads it as torch is loaded. Waiting threads would spin, and on a busy machine take most of its cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    hide_unusable_companions()  # not in serve: vLLM's children import a service's main without running it
    app = typer.Typer(
        help=f"trinity-{name}: {summary}", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )

    @app.command()
    def serve() -> None:
        """Serve until SIGTERM. See `settings` for the environment variables."""
        from trinity.runtime import host

        try:
            chosen = load_settings(settings)
            built = _named(service)(chosen)
        except (TrinityError, ValueError) as error:  # trinity.config's errors are kinds of ValueError
            typer.echo(f"trinity-{name}: {error}", err=True)
            sys.exit(EXIT_FOR_GOOD)
        host.main(built, chosen)

    def check() -> None:
        """Print what a start would refuse, as JSON: [field, problem] of each. It loads no weights."""
        answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # libraries print
        try:
            found = _named(refused)(load_settings(settings))
            problems = [[error.field, str(error).removeprefix(f"{error.field}: ")] for error in found]
        except InvalidInput as error:
            problems = [[error.field, str(error).removeprefix(f"{error.field}: ")]]
        answer.write(json.dumps(problems))
        answer.flush()
        os._exit(0)  # vLLM's import leaves threads

    if refused:
        app.command()(check)

    @app.command()
    def health() -> None:
        """Exit code 0 if the service with this environment is SERVING, else 1 and the reason. For health checks."""
        from trinity.runtime import health, host

        try:
            chosen = load_settings(settings)
            problem = health.problem(chosen, host.identity_of(name, chosen))
        except TrinityError as error:
            problem = str(error)
        if problem:
            typer.echo(f"trinity-{name}: {problem}", err=True)
            sys.exit(1)

    @app.command("settings")
    def show_settings() -> None:
        """Every setting: environment variable, default, meaning."""
        prefix = str(settings.model_config.get("env_prefix", ""))
        for field, info in settings.model_fields.items():
            default = "required" if info.is_required() else f"default {info.get_default(call_default_factory=True)}"
            typer.echo(f"{f'{prefix}{field}'.upper()}  ({default})\n    {info.description}")

    @app.command("version")
    def show_version() -> None:
        """The installed version."""
        typer.echo(installed_version(f"trinity-{name}"))

    return app


def _named(place: str) -> Any:
    """Imports "package.module:name"."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
