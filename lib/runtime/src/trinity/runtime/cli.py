"""The command line of every service process: `serve`, `health`, `settings`, `version`. Parse first, then import."""

import importlib
import sys

import typer

from trinity.runtime.errors import EXIT_FOR_GOOD, TrinityError
from trinity.runtime.settings import ServiceSettings, load_settings
from trinity.runtime.torch_builds import hide_unusable_companions
from trinity.runtime.version import installed_version


def service_app(name: str, summary: str, settings: type[ServiceSettings], service: str) -> typer.Typer:
    """The app of one service; `service` is "package.module:Class", which only `serve` imports."""
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
            module, _, attribute = service.partition(":")
            built = getattr(importlib.import_module(module), attribute)(chosen)
        except (TrinityError, ValueError) as error:  # trinity.config's errors are kinds of ValueError
            typer.echo(f"trinity-{name}: {error}", err=True)
            sys.exit(EXIT_FOR_GOOD)
        host.main(built, chosen)

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
