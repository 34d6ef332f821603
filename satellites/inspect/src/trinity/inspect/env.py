"""`trinity env`: contract checks of providers, the providers of a run, and their tokens."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from trinity.commands import AsJson, command, group
from trinity.inspect import env_tokens
from trinity.plugins import satellites
from trinity.plugins.environments import offers
from trinity.reading.client import provider_facts
from trinity.reading.errors import RunError
from trinity.reading.reader import JobStage, find_job_stage, live_services
from trinity.reading.render import to_json
from trinity.reading.wire import Facts, provider_line
from trinity.runtime import rpc
from trinity.runtime.settings import split_address
from trinity.runtime.trust.identity import Identity, of_certificate
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.tls import TlsFiles, TlsIdentity

app = group("Providers of environments.")
app.add_typer(env_tokens.app, name="tokens")


@command(app, "check")
def check(
    address: Annotated[str, typer.Argument(help="gRPC address of the provider, host:port")],
    name: Annotated[str, typer.Option("--name", "-n", help="Only this environment or scorer; else all")] = "",
    task: Annotated[str, typer.Option("--task", help="The task's row that is played, a JSON object")] = "{}",
    args: Annotated[str, typer.Option("--args", help="Environment arguments, a JSON object")] = "",
    action: Annotated[str, typer.Option("--action", help="Text of every action")] = "look",
    max_steps: Annotated[int, typer.Option("--max-steps", min=1, help="Actions of an episode at most")] = 20,
    shown: Annotated[
        Path | None,
        typer.Option("--identity", help="Show a run's identity: <job>/identity, or a folder of `trinity certs`"),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Check that a provider keeps the contract of docs/environments.md. Exit code 1 if it does not.

    It is shown no identity, unless --identity says that it is a run's own environment service.
    """
    split_address(address, "ADDRESS")
    for option, text in (("--task", task), ("--args", args or "{}")):
        _check_object(option, text)
    suite = satellites.find("conformance")
    if suite is None:
        raise RunError(f"the checks are in {satellites.missing('conformance')}", 2)
    identity = _identity(shown) if shown is not None else None
    sample, channel = suite.Sample(task, args, action, max_steps), partial(rpc.channel, address, identity=identity)
    results = asyncio.run(suite.report(address, sample, name, channel, quiet=as_json))
    if as_json:
        print(to_json(results))
    return 1 if any(result.verdict is suite.Verdict.FAILED for result in results) else 0


@command(app, "list", find_job_stage)
def list_providers(job_stage: JobStage, as_json: AsJson = False) -> str:
    """List the providers of a live run, attached or named by the YAML: health, since when, and why."""

    async def read() -> list[Facts]:
        addresses = await live_services(job_stage)
        named = job_stage.config.explorer.environments
        return await provider_facts(addresses.environment, [(one.name, one.address) for one in named])

    found = asyncio.run(read())
    if as_json:
        return to_json(found)
    lines = map(provider_line, found)
    return "\n".join(lines) or f"{job_stage.name}: no providers except the environment service"


@command(app, "status")
def status(as_json: AsJson = False) -> str:
    """List the environments that this machine can play, with the versions of their packages, and what others need."""
    found = list(offers())
    if as_json:
        return to_json(found)
    wide = max(len(one.name) for one in found)
    return "\n".join(
        f"{one.name:<{wide}}  {' '.join(filter(None, (one.source, one.package, one.version)))}"
        + (f"  cannot be played here: {one.problem}" if one.problem else "")
        for one in found
    )


def _identity(folder: Path) -> Identity:
    """Returns the identity of an explorer, which the checks use.

    Raises RunError if the folder has none, InvalidInput if its files are damaged.
    """
    for own in (folder / "explorer", folder):
        if (own / "tls.crt").exists():
            return of_certificate(TlsIdentity(TlsFiles(own / "tls.crt", own / "tls.key", own / "ca.crt")))
    found = Identity(Role.EXPLORER, folder)
    if not found.metadata():
        raise RunError(f"--identity: {folder} has neither tokens/explorer nor explorer/tls.crt that you may read", 2)
    return found


def _check_object(option: str, text: str) -> None:
    try:
        problem = "" if isinstance(json.loads(text), dict) else "is no JSON object"
    except (ValueError, RecursionError) as error:
        problem = f"is no JSON: {error}"
    if problem:
        raise RunError(f'{option}: {problem}; give one as \'{{"question": "6 x 7?"}}\'', code=2)
