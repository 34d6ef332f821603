"""`trinity cost`: device-seconds of a stage by outcome (docs/ledger.md), or of the tenants of `trinity tinker`."""

from pathlib import Path
from typing import Annotated

import typer

from trinity.commands import AsJson, command, group
from trinity.plugins import satellites
from trinity.reading.accounts.fates import Facts
from trinity.reading.errors import RunError
from trinity.reading.reader import JobStage, find_job_stage
from trinity.reading.render import losses_text, table, to_json
from trinity.study.cost import collect

app = group()


def find_account(config: Path | None = None, job: Path | None = None, stage: str = "") -> JobStage | Path:
    """Like `find_job_stage`, for a run whose job folder is here: its account is in files. Returns the folder of a
    service for tinker clients."""
    tenants = satellites.find("tenants")
    return (tenants and tenants.folder_of_service(config, job)) or find_job_stage(config, job, stage)


@command(app, "cost", find_account)
def cost(
    place: JobStage | Path,
    tenant: Annotated[
        str, typer.Option("--tenant", help="One tenant of a service for tinker clients; else all of them")
    ] = "",
    as_json: AsJson = False,
) -> str:
    """Show what the seconds of devices went to: trained, dropped, failed, idle; or which tenants used them."""
    if isinstance(place, Path):
        return str(satellites.find("tenants").report(place, tenant, as_json))
    if tenant:
        raise RunError(
            f"--tenant {tenant}: {place.name} is a run, without tenants; give the YAML of `trinity tinker`", 2
        )
    found = collect(place)
    return to_json(found) if as_json else render(place.name, found)


def render(name: str, found: Facts) -> str:
    """Returns the account as text."""
    services = dict.fromkeys(process["service"] for process in found["processes"])
    rows = [
        {"fate": fate, "total": seconds, **{service: _of(found, service, fate) for service in services}}
        for fate, seconds in found["fates"].items()
    ]
    columns = {"seconds of devices": lambda row: row["fate"]}
    columns |= {service: lambda row, key=service: f"{row[key]:.1f}" for service in services}
    columns |= {"all": lambda row: f"{row['total']:.1f}"}
    columns |= {"share": lambda row: f"{row['total'] / max(found['gpu_seconds'], 1e-9):.1%}"}
    devices = ", ".join(f"{one['devices']:g} of {one['name']}" for one in _newest(found))
    title = f"{name}: {found['gpu_hours']:.3f} hours of devices ({devices}), {found['kills']} processes died"
    lost = losses_text(found["losses"])
    if lost and found["ettr"] is not None:
        lost.append(f"ETTR {found['ettr']:.1%}: the part of the trainer's time that these did not cost")
    return "\n".join([title, table(rows, columns), *lost])


def _of(found: Facts, service: str, fate: str) -> float:
    return sum(one["fates"].get(fate, 0.0) for one in found["processes"] if one["service"] == service)


def _newest(found: Facts) -> list[Facts]:
    return list({one["name"]: one for one in found["processes"]}.values())
