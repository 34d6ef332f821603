"""The seconds of a run's devices, as `trinity cost` counts them, and the price of the trained tokens."""

import asyncio
import math
from typing import Any

from trinity.reading.accounts.fates import Groups
from trinity.reading.errors import RunError
from trinity.study import cost
from trinity.ui import charts, screens
from trinity.ui.source import Source

Facts = dict[str, Any]

_LISTED_GROUPS = 20
_MOST_PRICE = 1e6  # for an hour of a device
_COLOURS = 8  # of fates


async def waste(source: Source, typed: str = "") -> Facts:
    """Returns device-seconds by fate. `typed`: the typed price of an hour of a device; empty for none.

    Raises RunError for a run without account, or a price outside 0 to 1,000,000.
    """
    price = _price(typed)
    if source.folder is None:
        raise RunError("the accounts of devices are in the job folder, and this run's is on another machine")
    problems: list[str] = []
    measured = await asyncio.to_thread(cost.measure, source.folder)
    counts = await screens.or_none(source.counts(), problems)
    groups = source.groups if counts else Groups()
    shares = groups.shares(counts["stored"], counts["duplicates_dropped"]) if counts else {"stored": 1.0}
    found = cost.account(source.job_stage.run, measured, groups, shares)
    services = list(dict.fromkeys(one["service"] for one in found["processes"]))
    return {
        "account": found,
        "services": services,
        "fates": [_fate(place, fate, found, services) for place, fate in enumerate(found["fates"])],
        "bar": charts.stacked(found["fates"], " s", _COLOURS),
        "dearest": sorted(found["groups"], key=lambda one: -one["seconds"])[:_LISTED_GROUPS],
        "read": source.audit.newest_step,
        "of": counts["ledger_step"] if counts else 0,
        "price": typed,
        "money": _money(price, found) if price is not None else None,
        "problems": problems,
        "command": f"trinity cost {source.option}",
    }


def _price(typed: str) -> float | None:
    if not typed.strip():
        return None
    try:
        price = float(typed)
    except ValueError:
        price = math.nan
    if not 0 <= price <= _MOST_PRICE:
        raise RunError(f"price: {typed!r} is no number from 0 to {_MOST_PRICE:,.0f}; it is for an hour of a device")
    return price


def _fate(place: int, fate: str, found: Facts, services: list[str]) -> Facts:
    by_service = dict.fromkeys(services, 0.0)
    for one in found["processes"]:
        by_service[one["service"]] += one["fates"].get(fate, 0.0)
    seconds = found["fates"][fate]
    share = seconds / max(found["gpu_seconds"], 1e-9)
    return {"name": fate, "part": place % _COLOURS, "seconds": seconds, "share": share, "by_service": by_service}


def _money(price: float, found: Facts) -> Facts:
    """Returns the price of the devices, and of 1,000 trained tokens; None without trained tokens."""
    tokens = sum(one["tokens"] for one in found["groups"] if one["fate"] == "trained")
    whole = price * found["gpu_hours"]
    return {"whole": whole, "tokens": tokens, "per_thousand": 1000 * whole / tokens if tokens else None}
