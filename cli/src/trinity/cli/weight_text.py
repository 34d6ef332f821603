"""Explorers and weight versions, as the commands show them: JSON facts and text."""

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.cli.tail import visible

_WIDTH = 140
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

Facts = dict[str, Any]


def member_facts(member: pb.Member) -> Facts:
    """What is shown of an explorer. `canary_max_error` is None until it has computed a canary."""
    able = member.capabilities
    return {
        "name": member.explorer_id,
        "state": member.state,
        "version": member.version,
        "lag": member.lag,
        "transport": member.transport,
        "transports": list(able.transports),
        "dtype": able.dtype,
        "engines": able.engines,
        "tensor_parallel_size": able.tensor_parallel_size,
        "tokens_per_second": member.tokens_per_second,
        "tokens_generated": member.tokens_generated,
        "last_pause_seconds": member.last_pause_seconds,
        "canary_max_error": finite(member.canary_max_error),
        "host": member.host,
        "pid": member.pid,
        "address": member.address,
        "seconds_since_report": member.seconds_since_report,
        "failure": member.failure,
    }


def finite(value: float) -> float | None:
    """JSON has no NaN: a value that is not finite or not measured becomes null."""
    return value if math.isfinite(value) else None


def error_text(value: float | None) -> str:
    """A difference of log-probabilities, in nats."""
    return "not finite" if value is None else f"{value:.2g}"


def brief(version: pb.WeightVersion) -> Facts:
    """The fields that a list shows."""
    manifest, judged = version.manifest, version.HasField("measured")
    return {
        "version": manifest.version,
        "step": manifest.step,
        "state": state_of(version),
        "explorers": version.holders,
        "size_bytes": sum(file.size_bytes for file in manifest.files),
        "delta_bytes": sum(file.size_bytes for file in manifest.delta.files) if manifest.HasField("delta") else None,
        "base_version": manifest.delta.base_version if manifest.HasField("delta") else None,
        "transports": sorted({_transport(offer) for offer in manifest.offers}),
        "canary": manifest.HasField("canary"),
        "canary_max_error": finite(version.measured.max_error) if judged else None,
        "pinned": version.pinned,
        "committed": version.committed,
        "made_at_seconds": manifest.created_at_seconds,
        "reason": version.reason,
        "judged": judged,
    }


def whole(version: pb.WeightVersion) -> Facts:
    """All fields."""
    manifest = version.manifest
    dtypes: dict[str, dict[str, int]] = {}
    for dtype, count in Counter(tensor.dtype for tensor in manifest.tensors).items():
        size = sum(tensor.size_bytes for tensor in manifest.tensors if tensor.dtype == dtype)
        dtypes[dtype] = {"tensors": count, "bytes": size}
    return {
        **brief(version),
        "base_model": manifest.base_model,
        "offers": [_offer(manifest, offer) for offer in manifest.offers],
        "files": len(manifest.files),
        "tensors": len(manifest.tensors),
        "dtypes": dtypes,
        "canary": _canary(version),
    }


def _transport(offer: pb.Offer) -> str:
    return str(offer.WhichOneof("transport") or "unknown")


def _offer(manifest: pb.Manifest, offer: pb.Offer) -> Facts:
    """One transport: its address and content."""
    kind = _transport(offer)
    where = {
        "folder": offer.folder.path,
        "s3": f"s3://{offer.s3.bucket}/{offer.s3.prefix}" + (f" at {offer.s3.endpoint}" if offer.s3.endpoint else ""),
        "jetstream": f"{offer.jetstream.prefix} in the run's stream of weights",
        "collective": f"group {offer.collective.epoch}, buckets of {size_text(offer.collective.bucket_bytes)}",
    }.get(kind, "")
    files = manifest.delta.files if offer.delta else manifest.files
    return {"transport": kind, "where": where, "delta": offer.delta, "bytes": sum(file.size_bytes for file in files)}


def _canary(version: pb.WeightVersion) -> Facts | None:
    """Expected and measured log-probabilities; None for a version without canary."""
    if not version.manifest.HasField("canary"):
        return None
    canary = version.manifest.canary
    found: Facts = {
        "probes": len(canary.probes),
        "tokens": sum(len(probe.token_ids) for probe in canary.probes),
        "mean_tolerance": canary.mean_tolerance,
        "max_tolerance": canary.max_tolerance,
        "measured": None,
    }
    if version.HasField("measured"):
        by = version.measured
        found["measured"] = {
            "explorer": by.explorer_id,
            "mean_error": finite(by.mean_error),
            "max_error": finite(by.max_error),
            "expected": finite(by.expected),
            "computed": finite(by.computed),
        }
    return found


def state_of(version: pb.WeightVersion) -> str:
    return str(pb.VersionState.Name(version.state)).removeprefix("VERSION_STATE_")


def size_text(size: float) -> str:
    """Bytes in the unit that suits them."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 or size >= 100 else f"{size:.1f} {_UNITS[unit]}"


def age_text(seconds: float) -> str:
    for limit, unit, length in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{max(0.0, seconds) / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def to_json(value: Any) -> str:
    """DEL is the one control character JSON lets through."""
    return json.dumps(value, indent=1).replace("\x7f", "\\u007f")


def table(title: str, versions: Sequence[Facts]) -> str:
    """A text table, one line for each version, with reasons of rejections below."""
    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("version", "step"):
        drawn.add_column(column, justify="right", no_wrap=True)
    drawn.add_column("state", no_wrap=True)
    for column in ("explorers", "size"):
        drawn.add_column(column, justify="right", no_wrap=True)
    for column in ("delta", "transports", "canary", "pinned", "age"):
        drawn.add_column(column, no_wrap=True)
    for one in versions:
        cells = (
            str(one["version"]),
            str(one["step"]),
            one["state"],
            str(one["explorers"]),
            size_text(one["size_bytes"]) if one["size_bytes"] else "-",
            "-" if one["base_version"] is None else f"{size_text(one['delta_bytes'])} on {one['base_version']}",
            ", ".join(one["transports"]) or "base model",
            _canary_text(one),
            "yes" if one["pinned"] else "",
            age_text(time.time() - one["made_at_seconds"]),
        )
        drawn.add_row(*(Text(visible(cell)) for cell in cells))
    console = Console(width=_WIDTH)
    with console.capture() as capture:
        console.print(drawn)
    lines = [visible(title), *(line.rstrip() for line in capture.get().splitlines())]
    return "\n".join(lines + [visible(f"{one['version']}: {one['reason']}") for one in versions if one["reason"]])


def _canary_text(version: Facts) -> str:
    if not version["canary"]:
        return "none"
    return error_text(version["canary_max_error"]) if version["judged"] else "awaited"


def describe(found: Facts) -> str:
    """All fields of one version as text."""
    facts = {
        "version": f"{found['version']}, of optimizer step {found['step']}",
        "state": found["state"] + (f": {found['reason']}" if found["reason"] else ""),
        "made": f"{_when(found['made_at_seconds'])}, {age_text(time.time() - found['made_at_seconds'])} ago",
        "explorers": ", ".join(found["explorers"]) or "none",
        "pinned": "yes" if found["pinned"] else "no",
    }
    if found["base_model"]:
        facts["base model"] = found["base_model"]
    for offer in found["offers"]:
        kind = "difference" if offer["delta"] else "whole"
        facts[offer["transport"] + (" (delta)" if offer["delta"] else "")] = (
            f"{offer['where']}: {kind}, {size_text(offer['bytes'])}"
        )
    if found["base_version"] is not None:
        facts["delta"] = f"{size_text(found['delta_bytes'])} to version {found['base_version']}"
    if found["tensors"]:
        each = (f"{part['tensors']} {dtype}, {size_text(part['bytes'])}" for dtype, part in found["dtypes"].items())
        facts["tensors"] = f"{found['tensors']} in {found['files']} file(s): {'; '.join(each)}"
    facts |= _canary_facts(found["canary"])
    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {visible(value)}" for name, value in facts.items())


def _canary_facts(canary: Facts | None) -> dict[str, str]:
    if canary is None:
        return {"canary": "none: explorers cannot check what they load"}
    mean, most = canary["mean_tolerance"], canary["max_tolerance"]
    facts = {
        "canary": f"{canary['probes']} sequence(s), {canary['tokens']} tokens; log-probabilities may differ by "
        f"{mean:g} nats in the mean, {most:g} for one token"
    }
    measured = canary["measured"]
    if measured is None:
        return facts | {"measured": "not yet"}
    expected, computed = (_number(measured[key]) for key in ("expected", "computed"))
    return facts | {
        "measured": f"{error_text(measured['mean_error'])} in the mean, {error_text(measured['max_error'])} for one "
        f"token ({expected} expected, {computed} computed), by {measured['explorer']}"
    }


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
