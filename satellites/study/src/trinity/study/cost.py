"""Device-seconds of a stage by outcome, for `trinity cost` (docs/ledger.md)."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from trinity.reading.accounts import fates, lives
from trinity.reading.accounts.fates import Facts, Fates, Groups
from trinity.reading.accounts.lives import Watch
from trinity.reading.errors import RunError
from trinity.reading.reader import JobStage, Reader, any_buffer, ask

_HOUR = 3600.0


@dataclass(frozen=True)
class Measured:
    """Device-seconds of each process of a stage by fate. Those of stored groups are not divided yet."""

    watches: list[Watch]
    fates: list[Fates]
    losses: list[Facts]

    @property
    def stored(self) -> float:
        """Seconds of engines for stored groups."""
        return sum(one.get("stored", 0.0) for one in self.fates)


def measure(stage: Path) -> Measured:
    """Measures a stage. Raises RunError if its supervisor kept no account."""
    watches = lives.read(stage)
    if not watches:
        raise RunError(f"{stage} has no account of devices: no `trinity run` of this version trained it", code=2)
    steps = fates.read_steps(stage)
    each = [fates.of_watch(watch, stage, steps) for watch in watches]
    return Measured(watches, each, fates.losses(watches, steps))


def collect(job_stage: JobStage) -> Facts:
    """Returns all values. Raises RunError as `measure` does."""
    found = measure(job_stage.folder)
    groups, shares = ask(any_buffer, job_stage, _groups) if found.stored else (Groups(), {})
    return account(job_stage.run, found, groups, shares)


def account(run: str, measured: Measured, groups: Groups, shares: Mapping[str, float]) -> Facts:
    """Returns all values. `shares`: `Groups.shares` of the groups in the ledger."""
    watches, own = measured.watches, [fates.divided(one, shares) for one in measured.fates]
    seconds = sum(watch.seconds for watch in watches)
    return {
        "run": run,
        "gpu_seconds": seconds,
        "gpu_hours": seconds / _HOUR,
        "kills": sum(watch.kills for watch in watches),
        "fates": _sorted(own),
        "losses": measured.losses,
        "ettr": _ettr(measured),
        "processes": [
            {
                "name": watch.name,
                "service": watch.service,
                "devices": watch.devices,
                "began_at_seconds": watch.began,
                "wall_seconds": watch.ended - watch.began,
                "kills": watch.kills,
                "fates": _sorted([of_it]),
            }
            for watch, of_it in zip(watches, own, strict=True)
        ],
        "groups": list(groups.seconds(measured.stored, shares)),
    }


def _ettr(measured: Measured) -> float | None:
    """Returns the effective training time ratio: the part of the trainer's time that its ends did not cost."""
    watches = [watch for watch in measured.watches if watch.leads]
    seconds = sum(watch.ended - watch.began for watch in watches)
    for watch, after in pairwise(watches):
        if watch.lives and watch.lives[-1].how == "died":
            seconds += max(0.0, after.began - watch.ended)  # until a killed `trinity run` is started again
    lost = sum(loss["seconds"] for loss in measured.losses)
    return max(0.0, 1 - lost / seconds) if seconds else None


def _sorted(found: Iterable[Fates]) -> dict[str, float]:
    """Returns the sums, largest first."""
    sums: Fates = defaultdict(float)
    for one in found:
        for fate, seconds in one.items():
            sums[fate] += seconds
    return {fate: seconds for fate, seconds in sorted(sums.items(), key=lambda item: -item[1]) if seconds}


async def _groups(reader: Reader) -> tuple[Groups, dict[str, float]]:
    counts, groups = await reader.buffer.counts(), Groups()
    for step in range(1, counts["ledger_step"] + 1):
        groups.add(await reader.buffer.entry(step))
        await asyncio.sleep(0)
    return groups, groups.shares(counts["stored"], counts["duplicates_dropped"])
