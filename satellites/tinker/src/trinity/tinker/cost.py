"""Device-seconds of the tenants of `trinity tinker`, for `trinity cost --tenant` and the pages (docs/tinker.md)."""

from pathlib import Path

from trinity.data.tenants import account
from trinity.reading.accounts.fates import Facts
from trinity.reading.errors import RunError


def folder_of_service(config: Path | None, job: Path | None) -> Path | None:
    """Returns the folder of the service that a YAML or a folder is of; None if it is of a run. Raises ConfigError."""
    if config is not None:
        from trinity.config.document import read_document, read_text
        from trinity.config.tinker import load_tinker

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
