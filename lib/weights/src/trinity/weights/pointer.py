"""The pointer of a run: which version is LIVE, and the rollbacks that led there.

One JSON value under `RunNames.live_key` in the bucket of versions. Only the sync service writes it, always by
compare-and-set; the buffer and the command line read it. What is withdrawn follows from it alone: a version that a
rollback withdrew never comes back, and no later version has its number.

Beside it the sync service keeps a record of each version; others may read its verification result there.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from trinity.runtime.errors import DataLoss
from trinity.weights.manifest import VersionState

MOST_ROLLBACKS = 20
# What decoding a value of KV raises that no sync service wrote.
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Rollback:
    """A completed rollback: `version` is LIVE again, and every newer published version is withdrawn.

    `newest_version` and `newest_step` were the last published; `at_seconds` is Unix time.
    """

    number: int
    version: int
    newest_version: int
    newest_step: int
    keep_experience: bool = False
    reason: str = ""
    at_seconds: float = 0.0

    def withdraws(self, version: int) -> bool:
        return self.version < version <= self.newest_version


@dataclass(frozen=True)
class Live:
    """The pointer. version -1: nothing is LIVE yet.

    Gates up to optimizer step `gate_step` are met: the LIVE version's own step, or more if the versions of those steps
    were rejected or withdrawn; it never goes down. `rollbacks` are the newest ones, oldest first. `withdrawn` are the
    ranges (after, up to and including) of all rollbacks of the run. `newest_version` and `newest_step` belong to
    the newest version ever registered, in any state; `claim` is the newest trainer's claim: holders of older claims can
    change nothing.
    """

    version: int = -1
    step: int = -1
    gate_step: int = -1
    rollbacks: tuple[Rollback, ...] = ()
    withdrawn: tuple[tuple[int, int], ...] = ()
    newest_version: int = -1
    newest_step: int = -1
    claim: int = 0

    def is_withdrawn(self, version: int) -> bool:
        return any(after < version <= newest for after, newest in self.withdrawn)

    @property
    def rollback(self) -> Rollback | None:
        """The newest one."""
        return self.rollbacks[-1] if self.rollbacks else None


def encode_live(live: Live) -> bytes:
    return json.dumps(asdict(live)).encode()


def decode_live(value: bytes) -> Live:
    """The pointer; that of a run without one for an empty value. Fields of a newer writer are left out.

    DataLoss for a value that no sync service wrote.
    """
    try:
        return _decode_live(json.loads(value)) if value else Live()
    except UNREADABLE as error:
        raise DataLoss(f"the pointer to the LIVE version cannot be read: {type(error).__name__}: {error}") from None


def _decode_live(fields: dict[str, Any]) -> Live:
    step = fields.get("step", -1)
    live = Live(
        version=fields["version"],
        step=step,
        gate_step=fields.get("gate_step", step),
        rollbacks=tuple(Rollback(**_known(rollback)) for rollback in fields.get("rollbacks", ())),
        withdrawn=tuple((after, newest) for after, newest in fields.get("withdrawn", ())),
        newest_version=fields.get("newest_version", fields["version"]),
        newest_step=fields.get("newest_step", step),
        claim=fields.get("claim", 0),
    )
    numbers = [live.version, step, live.gate_step, live.newest_version, live.newest_step, live.claim]
    numbers += [number for span in live.withdrawn for number in span]
    numbers += [number for r in live.rollbacks for number in (r.number, r.version, r.newest_version, r.newest_step)]
    if not all(type(number) is int for number in numbers):
        raise TypeError("versions and steps must be whole numbers")
    return live


def verdict_of(record: bytes) -> VersionState | None:
    """STAGED, VERIFIED or REJECTED, of a version's record under `RunNames.version_key`; None if there is none.

    DataLoss for a value that no sync service wrote.
    """
    try:
        return VersionState(json.loads(record)["state"]) if record else None
    except UNREADABLE as error:
        raise DataLoss(f"the record of a version cannot be read: {type(error).__name__}: {error}") from None


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in Rollback.__dataclass_fields__ if name in fields}
