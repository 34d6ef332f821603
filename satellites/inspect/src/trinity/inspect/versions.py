"""`trinity weights`: list, show and pin the versions of a live run; rollback.py goes back."""

import time
from typing import Annotated

import typer

from trinity.commands import AsJson, command, group
from trinity.inspect.rollback import RollbackRequest, numbered, roll_back
from trinity.reading.client import Sync
from trinity.reading.reader import JobStage, ask, find_job_stage, live_sync
from trinity.reading.render import age_text, error_text, pairs, size_text, table, to_json, visible, when
from trinity.reading.wire import Facts, VersionRow

app = group("The weight versions of a live run.")

Number = Annotated[int, typer.Argument(metavar="VERSION", min=0, help="Its number")]


def _delta(one: VersionRow) -> str:
    return "-" if one.delta_bytes is None else f"{size_text(one.delta_bytes)} on {one.base_version}"


def _measured(one: VersionRow) -> str:
    if not one.canary:
        return "none"
    return error_text(one.canary_max_error) if one.judged else "awaited"


_COLUMNS = {
    "version": lambda one: one.version,
    "step": lambda one: one.step,
    "state": lambda one: one.state,
    "explorers": lambda one: one.explorers,
    "files": lambda one: "gone" if one.files_gone else "there",
    "size": lambda one: size_text(one.size_bytes) if one.size_bytes else "-",
    "delta": _delta,
    "transports": lambda one: ", ".join(one.transports) or "base model",
    "canary": _measured,
    "pinned": lambda one: "yes" if one.pinned else "",
    "age": lambda one: age_text(time.time() - one.made_at_seconds),
}


@command(app, "list", find_job_stage)
def list_versions(
    job_stage: JobStage,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most this many, newest first")] = 20,
    as_json: AsJson = False,
) -> str:
    """List versions, newest first: step, state, who serves them, size, transports, canary, age."""
    found = ask(live_sync, job_stage, lambda sync: sync.versions(limit))
    if as_json:
        return to_json(found)
    if not found:
        return f"{job_stage.name}: no versions yet; the base model is the first"
    more = f", the newest; --limit {2 * limit} shows more" if len(found) == limit else ""
    reasons = [visible(f"{one.version}: {one.reason}") for one in found if one.reason]
    return "\n".join([visible(f"{job_stage.name}: {len(found)} version(s){more}"), table(found, _COLUMNS), *reasons])


@command(app, "show", find_job_stage)
def show_version(job_stage: JobStage, number: Number, as_json: AsJson = False) -> str:
    """Show one version: transports, tensors and canary measurements."""

    async def read(sync: Sync) -> Facts:
        found = await sync.version(number)
        return found | {"explorers": [one.name for one in await sync.members() if one.version == number]}

    found = ask(live_sync, job_stage, read)
    return to_json(found) if as_json else describe(found)


@command(app, "pin", find_job_stage)
def pin_version(job_stage: JobStage, number: Number, as_json: AsJson = False) -> str:
    """Keep a version's files until it is unpinned."""
    text = f"version {number} is pinned: its files stay until `trinity weights unpin {number}`"
    return _pin(job_stage, number, True, to_json({"version": number, "pinned": True}) if as_json else text)


@command(app, "unpin", find_job_stage)
def unpin_version(job_stage: JobStage, number: Number, as_json: AsJson = False) -> str:
    """Let a version's files be deleted once they are not needed."""
    text = f"version {number} is not pinned: its files are deleted once they are not needed"
    return _pin(job_stage, number, False, to_json({"version": number, "pinned": False}) if as_json else text)


def _pin(job_stage: JobStage, number: int, pinned: bool, said: str) -> str:
    ask(live_sync, job_stage, lambda sync: sync.pin(number, pinned))
    return said


@command(app, "rollback", find_job_stage)
def rollback(
    job_stage: JobStage,
    version: Annotated[
        str,
        typer.Argument(
            metavar="VERSION", help="An older version that was LIVE: its number, live, latest, latest-2, checkpoint:120"
        ),
    ],
    keep_experience: Annotated[
        bool, typer.Option("--keep-experience", help="Train what the withdrawn versions sampled all the same")
    ] = False,
    reason: Annotated[str, typer.Option("--reason", help="Why, for the record")] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")] = False,
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for explorers and the buffer")] = 300.0,
    as_json: AsJson = False,
) -> str:
    """Make an older version LIVE again, on every explorer and in the trainer, and withdraw all newer ones."""
    given = str(version)  # isdecimal: isdigit is true of "²", too
    if given.isdecimal() and len(given) < 10:  # a longer one is no version
        number = int(given)
    else:
        number = ask(live_sync, job_stage, lambda sync: numbered(sync, given))
    return roll_back(job_stage, RollbackRequest(number, keep_experience, reason, yes, wait, as_json))


def describe(found: Facts) -> str:
    """Returns all fields of one version as text."""
    facts = {
        "version": f"{found['version']}, of optimizer step {found['step']}",
        "state": found["state"] + (f": {found['reason']}" if found["reason"] else ""),
        "made": f"{when(found['made_at_seconds'])}, {age_text(time.time() - found['made_at_seconds'])} ago",
        "explorers": ", ".join(found["explorers"]) or "none",
        "pinned": "yes" if found["pinned"] else "no",
        "files": "gone; no rollback to it is possible" if found["files_gone"] else "there",
    }
    if found["base_model"]:
        facts["base model"] = found["base_model"]
    for offer in found["offers"]:
        kind, name = ("difference", " (delta)") if offer["delta"] else ("whole", "")
        facts[offer["transport"] + name] = f"{offer['where']}: {kind}, {size_text(offer['bytes'])}"
    if found["base_version"] is not None:
        facts["delta"] = f"{size_text(found['delta_bytes'])} to version {found['base_version']}"
    if found["tensors"]:
        each = (f"{part['tensors']} {dtype}, {size_text(part['bytes'])}" for dtype, part in found["dtypes"].items())
        facts["tensors"] = f"{found['tensors']} in {found['files']} file(s): {'; '.join(each)}"
    return pairs(facts | _canary_facts(found["canary"]))


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
    values = (measured[key] for key in ("expected", "computed"))
    expected, computed = ("not finite" if value is None else f"{value:.4f}" for value in values)
    return facts | {
        "measured": f"{error_text(measured['mean_error'])} in the mean, {error_text(measured['max_error'])} for one "
        f"token ({expected} expected, {computed} computed), by {measured['explorer']}"
    }
