"""The pointer of a run to its LIVE version, with the rollbacks that led there; the collective group.

The pointer is one JSON value under `RunNames.live_key` in the bucket of versions. Only the sync service writes it,
always by compare-and-set; the buffer and the command line read it. It determines which versions are withdrawn: a
version that a rollback withdrew never comes back, and no later version has its number.

The sync service also keeps a record of each version, in which other processes read the verification result.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Any, TypeVar

import pydantic_core
from pydantic import TypeAdapter, ValidationError

from trinity.runtime.errors import DataLoss
from trinity.weights.wire import VersionState

MOST_ROLLBACKS = 20
# Raised by decoding a value of KV that no sync service wrote.
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)

Kind = TypeVar("Kind")


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
    the newest version ever registered, in any state. `claim` is the newest trainer's claim: holders of older claims can
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
        """The newest rollback; None before the first."""
        return self.rollbacks[-1] if self.rollbacks else None


@dataclass(frozen=True)
class EpochMember:
    """An explorer in a collective group: ranks first_rank .. first_rank + ranks - 1.

    Only the sync service knows `lease_id`.
    """

    explorer_id: str
    first_rank: int
    ranks: int
    lease_id: str = ""


@dataclass(frozen=True)
class Epoch:
    """A collective group. Rank 0 is the trainer. Number 0: there was none yet."""

    number: int = 0
    backend: str = ""
    store_address: str = ""
    members: tuple[EpochMember, ...] = ()
    store_secret: str = field(default="", repr=False)

    @property
    def world_size(self) -> int:
        return 1 + sum(member.ranks for member in self.members)

    def has(self, lease_id: str) -> bool:
        return any(member.lease_id == lease_id for member in self.members)


def encode(value: Any) -> bytes:
    """Encodes a dataclass as a value of KV."""
    return json.dumps(asdict(value)).encode()


def decode(kind: Callable[..., Kind], value: bytes) -> Kind:
    """Decodes a dataclass from a value of KV, without the fields of a newer writer.

    Writers of all ages have the first field of each kind; missing later fields get their defaults. Raises one of
    UNREADABLE for other values.
    """
    first = fields(kind)[0].name  # type: ignore[arg-type]
    if first not in pydantic_core.from_json(value):
        raise KeyError(first)
    try:
        return _adapter(kind).validate_json(value, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ValueError(f"{where} is {str(problem['input'])[:80]!r}: {problem['msg']}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def decode_live(value: bytes) -> Live:
    """Decodes the pointer; an empty value is that of a new run. Raises DataLoss for any other unreadable value."""
    try:
        live = decode(Live, value) if value else Live()
    except UNREADABLE as error:
        raise DataLoss(f"the pointer to the LIVE version cannot be read: {type(error).__name__}: {error}") from None
    newest = max(live.newest_version, live.version), max(live.newest_step, live.step)  # an older writer left these out
    return replace(live, gate_step=max(live.gate_step, live.step), newest_version=newest[0], newest_step=newest[1])


def verdict_of(record: bytes) -> VersionState | None:
    """Returns STAGED, VERIFIED or REJECTED from a version's record under `RunNames.version_key`; None without a record.

    Raises DataLoss for a value that no sync service wrote.
    """
    try:
        return VersionState(json.loads(record)["state"]) if record else None
    except UNREADABLE as error:
        raise DataLoss(f"the record of a version cannot be read: {type(error).__name__}: {error}") from None
