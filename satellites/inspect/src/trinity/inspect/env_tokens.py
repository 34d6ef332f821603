"""`trinity env tokens`: the tokens with which providers of environments may attach to a run."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from trinity.commands import AsJson, command, group
from trinity.config import load
from trinity.reading.errors import RunError
from trinity.reading.find import find_job
from trinity.reading.job import Job, make_private
from trinity.reading.render import to_json
from trinity.runtime.trust.attach_tokens import FILE_NAME, create_token, read_tokens, revoke_token

app = group("Tokens of providers that attach.")

_SETTING = "TRINITY_ENVIRONMENT_ATTACH_TOKENS_FILE"

FileOption = Annotated[
    Path | None, typer.Option("--file", help=f"File of tokens; else {_SETTING}, or the one in the job folder")
]
Name = Annotated[str, typer.Argument(help="Name of the token, as of the provider that attaches")]


def find_tokens(config: Path | None = None, job: Path | None = None, file: FileOption = None) -> Path:
    """Returns the file of tokens. A run that has not begun has a file too, if --config names the run."""
    given = [f"{name} {value}" for name, value in (("--file", file), ("--config", config), ("--job", job)) if value]
    if len(given) > 1:
        raise RunError(f"{' and '.join(given)} each name a file of tokens: give one of them", 2)
    if file is not None:
        return file
    if config is not None:
        return Job(load(config, plugins_loaded=False)).folder / FILE_NAME
    if job is None and (setting := os.environ.get(_SETTING)):
        return Path(setting)
    return find_job(None, job) / FILE_NAME


@command(app, "create", find_tokens)
def create(
    file: Path, name: Name, days: Annotated[int, typer.Option("--days", min=1, max=3650, help="Until it expires")] = 90
) -> str:
    """Create a token and print it, once: the file keeps only its digest. A live run accepts it at once."""
    make_private(file.parent)
    return create_token(file, name, days)


@command(app, "list", find_tokens)
def list_tokens(file: Path, as_json: AsJson = False) -> str:
    """List the tokens by name, with the day they expire."""
    tokens = read_tokens(file)
    if as_json:
        return to_json([{"name": one.name, "expires_at": one.expires_at, "expired": one.expired} for one in tokens])
    lines = [f"{one.name}  {'expired' if one.expired else 'until'} {_day(one.expires_at)}" for one in tokens]
    return "\n".join(lines) or f"{file}: no tokens"


@command(app, "revoke", find_tokens)
def revoke(file: Path, name: Name) -> str:
    """Revoke a token. A provider that attached with it loses its connection, and its tasks wait."""
    revoke_token(file, name)
    return f"revoked {name}"


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
