"""`trinity certs`: an authority for a deployment, and who is issued what."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trinity.cluster.certs import kubernetes
from trinity.cluster.certs.folder import NATS_SERVER, IdentityFolder, Request, Row, role_or_host
from trinity.commands import AsJson, command, group
from trinity.config.service import load_plan
from trinity.reading.errors import RunError
from trinity.reading.render import table, to_json, when
from trinity.runtime.names import run_id
from trinity.runtime.trust import ca
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.subjects import grants

app = group("Certificates and NATS credentials for services on several machines.")

# What a deployment needs at least: providers and explorers on other machines are issued by their names.
_SERVERS = ("buffer", "environment", "sync", "explorer", "trainer", NATS_SERVER)
_CLIENTS = ("operator", "reader")
_LOCAL = ("localhost", "127.0.0.1")
_PEERS = "*.nats-peers"  # how the servers of a cluster call each other in deploy/helm


class Form(StrEnum):
    SECRETS = "secrets"
    CERT_MANAGER = "cert-manager"
    NATS = "nats"  # only the users of NATS


Folder = Annotated[Path, typer.Option("--folder", "-f", help="Where the authority and its identities are kept")]
Hosts = Annotated[
    list[str] | None, typer.Option("--host", help="Name or address at which it is called; may be given several times")
]
Days = Annotated[float, typer.Option("--days", min=0.01, max=3650, help="Days until the certificates expire")]
RunId = Annotated[str, typer.Option("--run", help="Id of the run in which it uses NATS; --config computes it")]
RunConfig = Annotated[Path | None, typer.Option("--config", "-c", help="The run's YAML, instead of --run")]
Stage = Annotated[str, typer.Option("--stage", help="Stage of the YAML, if it has several")]
Kubernetes = Annotated[Form | None, typer.Option("--kubernetes", help="Print Kubernetes manifests too")]
_HERE = Path("identity")


@command(app, "init")
def init(
    folder: Folder = _HERE,
    host: Hosts = None,
    days: Days = 365,
    run: RunId = "",
    config: RunConfig = None,
    stage: Stage = "",
    kubernetes_form: Kubernetes = None,
) -> str:
    """Make an authority, and an identity for each service, the operator, a reader and nats-server.

    A service's certificate is for the host of its role's name, as in compose, for localhost, and for every --host.
    """
    run = _run_id(run, config, stage)
    ca.check_hosts(host or ())  # before anything is made
    if run:
        grants(Role.READER, run, Role.READER)
    made = IdentityFolder.create(folder)
    for name in _SERVERS:
        hosts = (name, *_LOCAL, *([_PEERS] if name == NATS_SERVER else []), *(host or ()))
        made.issue(name, Request(role_or_host(name), hosts, days, run))
    for name in _CLIENTS:
        made.issue(name, Request(name, (), days, run))
    done = f"{folder}: an authority and {len(made.names)} identities, valid for {days:g} days; keep {folder}/ca secret"
    return _report(done, made, made.names, kubernetes_form, with_authority=True)


@command(app, "issue")
def issue(
    role: Annotated[str, typer.Argument(help=f"{', '.join(Role)}; or {NATS_SERVER}, for nats-server")],
    name: Annotated[str, typer.Option("--name", "-n", help="Of this process; the role, if not given")] = "",
    folder: Folder = _HERE,
    host: Hosts = None,
    days: Days = 365,
    run: RunId = "",
    config: RunConfig = None,
    stage: Stage = "",
    kubernetes_form: Kubernetes = None,
) -> str:
    """Write the files of one identity, ready to be mounted: tls.crt, tls.key, ca.crt, and nats.creds for a run.

    An explorer is called by its name in the run, or by `<name>/<anything>` where several share an identity.
    """
    found = IdentityFolder(folder)
    name = name or role
    found.issue(name, Request(role_or_host(role), tuple(host or ()), days, _run_id(run, config, stage)))
    return _report(f"{folder / name}: {role}, valid for {days:g} days", found, [name], kubernetes_form)


@command(app, "show")
def show(folder: Folder = _HERE, as_json: AsJson = False) -> str:
    """List identities: role, hosts, when they expire. Warns a month before that."""
    rows = IdentityFolder(folder).rows()
    _warn(rows)
    return to_json(rows) if as_json else table(rows, _COLUMNS)


@command(app, "rotate")
def rotate(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Identities; all, if none")] = None,
    folder: Folder = _HERE,
    host: Annotated[
        list[str] | None, typer.Option("--host", help="Called here from now on, in place of the hosts before")
    ] = None,
    new_authority: Annotated[
        bool, typer.Option("--ca", help="Make a new authority, trusted like the old one; issues nothing")
    ] = False,
    drop_old: Annotated[bool, typer.Option("--drop-old-ca", help="Trust only the newest authority")] = False,
) -> str:
    """Issue identities again, with their roles, and their hosts unless --host names others.

    Without names all that are not revoked; a revoked identity gets new files by its name.

    Services read the new files by themselves.

    A new authority takes three steps, and the files go to every machine after each: `--ca`, `rotate`, `--drop-old-ca`.
    """
    found = IdentityFolder(folder)
    if (new_authority or drop_old) and (names or host or new_authority is drop_old):
        raise RunError("give --ca, --drop-old-ca or names, one of them at a time", 2)
    if new_authority:
        found.add_authority()
        return f"{folder}: ca.crt of each identity trusts a new CA too; copy it to every machine, then rotate"
    if drop_old:
        found.drop_old_authorities()
        return f"{folder}: ca.crt of each identity trusts only the newest CA"
    if not names:
        found.renew_accounts()
    chosen = names or [row.name for row in found.rows()[1:] if row.state != "revoked"]
    requests = {name: found.request(name) for name in chosen}
    for name, request in requests.items():
        found.issue(name, replace(request, hosts=tuple(host)) if host else request)
    return f"{folder}: issued again: {', '.join(chosen)}"


@command(app, "revoke")
def revoke(
    targets: Annotated[
        list[str], typer.Argument(metavar="NAME|SERIAL...", help="Identities, or serial numbers of certificates")
    ],
    folder: Folder = _HERE,
    kubernetes_form: Kubernetes = None,
) -> str:
    """Refuse certificates and NATS users before they expire: all that a name was issued, or one by its serial number.

    Services read the file `revoked` again by themselves, nats-server accounts.conf on SIGHUP: both go to every machine.
    """
    found = IdentityFolder(folder)
    done = f"{folder}: revoked: {', '.join(found.revoke(targets))}"
    then = (
        f"copy `revoked` of each identity to its machine, {NATS_SERVER}/accounts.conf too, and send nats-server SIGHUP"
    )
    return _report(f"{done}; {then}", found, found.names, kubernetes_form)


def _run_id(run: str, config: Path | None, stage: str) -> str:
    """Returns the run's id by --run or by the YAML. Raises RunError if both are given."""
    if run and config is not None:
        raise RunError("give --run or --config, not both", 2)
    if config is None:
        return run
    found = load_plan(config, stage).config
    return run_id(found.project, found.name, found.group)


_COLUMNS = {
    "name": lambda row: row.name,
    "role": lambda row: row.role or "-",
    "expires": lambda row: when(row.expires_seconds),
    "days left": lambda row: f"{row.days_left:.0f}",
    "state": lambda row: row.state,
    "hosts": lambda row: ", ".join(row.hosts) or "-",
}


def _warn(rows: Sequence[Row]) -> None:
    for row in rows:
        if row.state in ("expired", "expires soon"):
            fix = "`trinity certs rotate --ca`" if row.name == "ca" else f"`trinity certs rotate {row.name}`"
            _say(f"{row.name} {row.state} ({when(row.expires_seconds)}): {fix}")


def _report(
    done: str, found: IdentityFolder, names: Sequence[str], form: Form | None, *, with_authority: bool = False
) -> str:
    """Returns the report; with manifests these, and the report goes to standard error."""
    if form is None:
        return done
    _say(done)
    if form is Form.SECRETS:
        return kubernetes.secrets(found, names)
    if form is Form.NATS:
        return kubernetes.nats_secrets(found, names)
    return kubernetes.cert_manager(found, names, with_authority=with_authority)


def _say(text: str) -> None:
    print(f"trinity: {text}", file=sys.stderr)
