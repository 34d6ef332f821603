"""Device-seconds of tenants, for `trinity cost --tenant` and the pages: the hook `tenants` (docs/tinker.md)."""

from pathlib import Path

from trinity.config.document import read_document, read_text
from trinity.reading.accounts.fates import Facts
from trinity.reading.errors import RunError
from trinity.reading.render import table, to_json
from trinity.tinker.commands import account
from trinity.tinker.config import load_tinker


def folder_of_service(config: Path | None, job: Path | None) -> Path | None:
    """Returns the folder of the service that a YAML or a folder is of; None if it is of a run. Raises ConfigError."""
    if config is not None:
        is_service = "tenants" in read_document(read_text(config), str(config), [])[0]
        return load_tinker(config).folder if is_service else None
    return job if job is not None and (job / "tenants").is_dir() else None


def services(root: Path) -> list[Path]:
    """Returns the folders of services below the folder of runs whose tenants have used a device."""
    return sorted({path.parents[2] for path in root.glob("tinker/*/tenants/accounts/*.json")})


def collect(folder: Path, tenant: str = "") -> Facts:
    """Returns requests and seconds of each tenant by kind, or of the given one. Raises RunError without any."""
    found = account.read(*(account.path_of(folder / "tenants", process) for process in ("tenants", "sampler")))
    uses = found.uses
    if not uses:
        raise RunError(f"{folder} has no account: no tenant has used a device yet", code=2)
    if tenant and tenant not in uses:
        raise RunError(f"--tenant {tenant}: used no device; {', '.join(sorted(uses))} did", code=2)
    tenants = {
        name: {
            "device_seconds": sum(use["seconds"] for use in kinds.values()),
            "sampled_seconds": kinds.get(account.SAMPLE, {"seconds": 0.0})["seconds"],
            "waiting": found.waiting.get(name, 0),
            "uses": kinds,
        }
        for name, kinds in uses.items()
        if tenant in ("", name)
    }
    by_seconds = sorted(tenants.items(), key=lambda item: -item[1]["device_seconds"])
    total = sum(one["device_seconds"] for one in tenants.values())
    return {"service": folder.name, "device_seconds": total, "tenants": dict(by_seconds)}


def report(folder: Path, tenant: str, as_json: bool) -> str:
    """Returns the account of a service as text or JSON. Raises RunError as `collect`."""
    found = collect(folder, tenant)
    return to_json(found) if as_json else _render(found, tenant)


def _render(found: Facts, tenant: str) -> str:
    """Returns the account of all tenants, or of one by the kinds of its requests, as text."""
    whole = max(found["device_seconds"], 1e-9)
    if tenant:
        rows = sorted(found["tenants"][tenant]["uses"].items(), key=lambda row: -row[1]["seconds"])
        columns = {
            tenant: lambda row: row[0],
            "requests": lambda row: row[1]["requests"],
            "seconds of devices": lambda row: f"{row[1]['seconds']:.1f}",
            "share": lambda row: f"{row[1]['seconds'] / whole:.1%}",
        }
        return table(rows, columns)
    return table(
        list(found["tenants"].items()),
        {
            "seconds of devices": lambda row: row[0],
            "commands": lambda row: f"{row[1]['device_seconds'] - row[1]['sampled_seconds']:.1f}",
            "samples": lambda row: f"{row[1]['sampled_seconds']:.1f}",
            "all": lambda row: f"{row[1]['device_seconds']:.1f}",
            "share": lambda row: f"{row[1]['device_seconds'] / whole:.1%}",
        },
    )
