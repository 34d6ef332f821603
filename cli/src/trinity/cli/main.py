"""The trinity command. A command's module is imported when the command is called, so --help answers at once."""

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from trinity.runtime.version import installed_version

# The module whose `app` is the command or the group of commands, below trinity.cli or of another distribution, and what
# --help says of it.
_COMMANDS = {
    "run": ("commands.run", "Run what a YAML describes, or resume where it stopped."),
    "check": ("commands.check", "Check a YAML and say what it would do. Needs no GPU, no network, no model, no data."),
    "debug": ("commands.debug.debug", "Run one task's workflow alone against one engine, and show what it makes."),
    "status": ("commands.status", "Show the processes of a live run, or how a finished one ended."),
    "ui": ("trinity.ui.main", "Show runs on a page: the ledger, groups, samples. Without --writes it only reads."),
    "export": ("trinity.ui.export", "Write ledger, experiences and metrics of a run as Parquet files."),
    "cost": ("commands.cost", "Show what the seconds of a run's devices went to."),
    "log": ("commands.log", "Show the log of a run, all processes in the order of time."),
    "view": ("commands.view", "Show the experiences that were trained."),
    "explorers": ("commands.weights.explorers", "List the explorers of a live run."),
    "results": ("commands.results", "Collect the evaluations of many runs in one table."),
    "replay": ("commands.ledger.replay", "Train steps again from the ledger, and compare with what the run did."),
    "replay-step": ("commands.ledger.replay_step", "Train the kept batch of a bad step again, and show its groups."),
    "bisect": ("commands.ledger.bisect", "Show the first place at which two runs differ."),
    "convert": (
        "trinity.convert",
        "Turn DeepSpeed, FSDP and Megatron checkpoints into Hugging Face folders.",
    ),
    "import-verl": ("trinity.import_verl", "Write the YAML of what a veRL script runs."),
    "deadletters": ("commands.ledger.dead_letters", "Tasks that failed for good."),
    "batch": ("commands.ledger.batch", "What a step learns from, out of the ledger."),
    "weights": ("commands.weights.versions", "The weight versions of a live run."),
    "launch": ("trinity.cluster.launch", "Run on a cluster: Slurm's jobs of a run, written and submitted."),
    "certs": ("trinity.cluster.certs.certs", "Certificates and NATS credentials for services on several machines."),
    "env": ("commands.env", "Providers of environments."),
}

# Settings that name the files of an identity, as `trinity certs` writes them.
_IDENTITY_FILES = {
    "TLS_CERT": "tls.crt", "TLS_KEY": "tls.key", "TLS_CA": "ca.crt", "NATS_CREDS": "nats.creds", "NATS_CA": "ca.crt",
}  # fmt: skip


class _OnDemand(TyperGroup):
    """Lists its commands without importing them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return TyperCommand(cmd_name, help=_COMMANDS[cmd_name][1]) if cmd_name in _COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        module = _module(_COMMANDS[str(name)][0])
        found = typer.main.get_command(module.app)
        found.name = name
        return name, found, rest


def _module(name: str) -> Any:
    if not name.startswith("trinity."):
        return importlib.import_module(f"trinity.cli.{name}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(str(error.name)):
            raise
        distribution = "-".join(name.replace("_", "-").split(".")[:2])
        print(f"trinity: this command is in {distribution}, which is not installed", file=sys.stderr)
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
    folder = os.environ.get("TRINITY_IDENTITY")
    if folder and context.invoked_subcommand != "certs":  # which makes such folders
        use_identity(Path(folder).absolute())


def use_identity(folder: Path) -> None:
    """Settings for the certificates and NATS credentials in TRINITY_IDENTITY; what is set already stays.

    `folder` is that of `trinity certs`, or one identity out of it: that of the machine's explorer, or of an operator.
    typer.BadParameter if it is neither.
    """
    own = next((path for path in (folder, folder / "operator") if (path / "tls.crt").is_file()), None)
    if own is None:
        problem = f"{folder} holds neither tls.crt nor operator/tls.crt, as `trinity certs` writes them"
        raise typer.BadParameter(problem, param_hint="TRINITY_IDENTITY")
    holders = {"": own, "EXPLORER_": own} if own == folder else {"": own}
    for service in ("buffer", "environment", "explorer", "sync", "trainer"):
        if (folder / service).is_dir():
            holders[f"{service.upper()}_"] = folder / service
    if (folder / "nats" / "tls.crt").is_file():
        os.environ.setdefault("TRINITY_NATS_IDENTITY", str(folder / "nats"))
    for prefix, path in holders.items():
        for setting, name in _IDENTITY_FILES.items():
            if (path / name).is_file():
                os.environ.setdefault(f"TRINITY_{prefix}{setting}", str(path / name))


if __name__ == "__main__":
    app()
