"""`trinity weights rollback`: make an older version LIVE again and wait until all have followed."""

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import typer

from trinity.reading.client import Buffer, NoAnswer, Sync
from trinity.reading.errors import RunError
from trinity.reading.reader import JobStage, live_services
from trinity.reading.render import to_json, visible
from trinity.reading.wire import Member
from trinity.runtime import rpc
from trinity.weights.pointer import Rollback

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class RollbackRequest:
    """The options of the command line. `wait_seconds`: time for explorers and buffer to follow."""

    version: int
    keep_experience: bool = False
    reason: str = ""
    yes: bool = False
    wait_seconds: float = 300.0
    as_json: bool = False


@dataclass(frozen=True)
class RunSnapshot:
    """The run before the rollback: LIVE version, versions to withdraw, explorers that have to load."""

    live: int
    withdrawn: tuple[int, ...]
    explorers: tuple[str, ...]


def roll_back(job_stage: JobStage, request: RollbackRequest) -> str:
    """Rolls back and reports the result.

    Raises RunError if it is refused, or if explorers or buffer do not follow in time.
    """
    return asyncio.run(_roll_back(job_stage, request))


async def _roll_back(job_stage: JobStage, request: RollbackRequest) -> str:
    addresses = await live_services(job_stage)
    async with rpc.channel(addresses.sync) as channel, rpc.channel(addresses.buffer) as buffer_channel:
        sync, buffer = Sync(channel, job_stage.run), Buffer(buffer_channel, job_stage.run)
        snapshot = await take_snapshot(sync, request.version)
        if snapshot.live == request.version:
            return _result(request, f"version {request.version} is LIVE already; nothing was done", {"rollback": None})
        fences = bool(addresses.buffer) and not request.keep_experience
        waiting = await buffer.waiting_after(request.version) if fences else None
        print(
            announcement(job_stage.name, snapshot, request, waiting), file=sys.stderr if request.as_json else sys.stdout
        )
        _confirm(request)
        before = await buffer.fenced() if fences else 0
        done, withdrawn = await sync.roll_back(request.version, request.keep_experience, request.reason)
        assert done is not None  # another version is LIVE
        deadline = time.monotonic() + request.wait_seconds
        dropped = await _until_fenced(buffer, done, deadline) - before if fences else 0
        explorers = await _until_served(sync, done, deadline)
    experience = f"the fence keeps {dropped} stored group(s) out of later batches"
    text = (
        f"version {done.version} is LIVE again (rollback {done.number}): {len(explorers)} explorer(s) serve it or a "
        f"newer one that was not withdrawn; {'their experience stays' if done.keep_experience else experience}"
    )
    facts = {"number": done.number, "version": done.version, "withdrawn": list(withdrawn)}
    return _result(request, text, {"rollback": facts, "explorers": explorers, "dropped_groups": dropped})


def _result(request: RollbackRequest, text: str, facts: dict[str, object]) -> str:
    return to_json(facts) if request.as_json else text


async def numbered(sync: Sync, name: str) -> int:
    """Resolves a version's name among the versions that were LIVE. Raises RunError.

    `latest-2` is two versions before the newest, `live` is the LIVE one, `checkpoint:120` is the version of step 120.
    """
    were_live = [one for one in await sync.versions() if one.state in ("LIVE", "RETIRED")]  # newest first
    if found := re.fullmatch(r"checkpoint:(\d+)", name):
        fitting = [one for one in were_live if one.step == int(found[1])]
    elif found := re.fullmatch(r"(latest|live)(?:-(\d+))?", name):
        first = next((n for n, one in enumerate(were_live) if one.state == "LIVE"), 0) if found[1] == "live" else 0
        fitting = were_live[first + int(found[2] or 0) :]
    else:
        raise RunError(
            f"{visible(name)!r} names no version; give a number, live, latest, latest-2 or checkpoint:120", 2
        )
    if not fitting:
        known = numbers(sorted(one.version for one in were_live))
        steps = numbers(sorted({one.step for one in were_live}))
        raise RunError(f"no version that was LIVE is {name}; there are versions {known}, of steps {steps}", 2)
    return fitting[0].version


async def take_snapshot(sync: Sync, number: int) -> RunSnapshot:
    """Returns the effect of a rollback to a version.

    Raises RunError if the version does not exist or cannot be LIVE again; the error lists versions that can.
    """
    wanted = await sync.version(number)
    if wanted["state"] not in ("LIVE", "RETIRED"):
        why = f" ({wanted['reason']})" if wanted["reason"] else ""
        raise RunError(visible(f"version {number} is {wanted['state']}{why}; roll back to a version that was LIVE"))
    versions = await sync.versions()
    if wanted["files_gone"]:
        usable = [v.version for v in versions if v.state in ("LIVE", "RETIRED") and not v.files_gone]
        raise RunError(
            f"the files of version {number} are gone; versions that were LIVE and have files: "
            f"{numbers(sorted(usable))} (`trinity weights pin` keeps files)"
        )
    return RunSnapshot(
        next((one.version for one in versions if one.state == "LIVE"), -1),
        tuple(sorted(one.version for one in versions if one.version > number and one.state != "REJECTED")),
        tuple(one.name for one in await sync.members() if one.version != number),
    )


def announcement(name: str, snapshot: RunSnapshot, request: RollbackRequest, waiting: int | None) -> str:
    """Returns the effect of the rollback as text.

    `waiting`: stored groups that the fence keeps out; None if unknown.
    """
    experience = "stays in later batches" if request.keep_experience else "enters no later batch"
    experience += "" if waiting is None else f" ({waiting} stored group(s) wait for one)"
    loads = ", ".join(snapshot.explorers) or "no explorer"
    return visible(
        f"{name}: version {request.version} becomes LIVE again in place of {snapshot.live}; withdrawn: "
        f"{numbers(snapshot.withdrawn)}, whose experience {experience}; loads it: {loads}; the trainer continues "
        "from its weights"
    )


def numbers(values: Sequence[int]) -> str:
    """Returns versions, without the middle of a long list."""
    if len(values) <= 6:
        return ", ".join(map(str, values)) or "none"
    return f"{values[0]}, {values[1]}, ..., {values[-1]} ({len(values)} versions)"


def _confirm(request: RollbackRequest) -> None:
    if request.yes:
        return
    if not sys.stdin.isatty():
        raise RunError("nothing was done; --yes does it without asking", code=2)
    if not typer.confirm("Continue?", err=True):
        raise RunError("nothing was done")


async def _until_fenced(buffer: Buffer, done: Rollback, deadline: float) -> int:
    """Returns how many groups fences have dropped, this one included.

    The buffer also fences without this request; repeating it is harmless.
    """
    while True:
        try:
            return await buffer.fence(
                range(done.version + 1, done.newest_version + 1), max(0.1, deadline - time.monotonic())
            )
        except NoAnswer as error:
            if time.monotonic() > deadline:
                raise RunError(
                    f"rollback {done.number} was made; the buffer has not fenced it yet and does so when it is back "
                    f"({error})"
                ) from None
        except RunError as error:
            raise RunError(f"rollback {done.number} was made, but {error}") from None
        await asyncio.sleep(_POLL_SECONDS)


async def _until_served(sync: Sync, done: Rollback, deadline: float) -> list[str]:
    """Waits until every serving explorer has left the withdrawn versions. Returns their names."""
    late: list[Member] = []
    while True:
        with contextlib.suppress(RunError):
            serving = [member for member in await sync.members() if member.version >= 0]
            late = [one for one in serving if one.version != done.version and one.version <= done.newest_version]
            if not late:
                return [member.name for member in serving]
        if time.monotonic() > deadline:
            who = "; ".join(
                f"{m.name} serves {m.version} ({m.state}, reported {m.seconds_since_report:.0f} s ago)" for m in late
            )
            raise RunError(visible(f"rollback {done.number} was made, but not all have followed: {who}"))
        await asyncio.sleep(_POLL_SECONDS)
