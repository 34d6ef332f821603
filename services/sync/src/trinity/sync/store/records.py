"""The service's entries in KV: one frozen dataclass for each kind of key, as JSON. trinity.weights has the pointer."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from trinity.weights.pointer import UNREADABLE, Kind, decode, encode
from trinity.weights.wire import ExplorerState, VersionState

__all__ = ["UNREADABLE", "decode", "encode"]  # UNREADABLE: raised by decoding a value that no sync service wrote


@dataclass(frozen=True)
class Measured:
    """An explorer's result for a canary; differences and log-probabilities in nats."""

    version: int
    mean_error: float
    max_error: float
    expected: float
    computed: float
    explorer_id: str


@dataclass(frozen=True)
class Failure:
    """A failed load of the explorer that was to verify a version; with `measured` a canary that is not reproduced."""

    explorer_id: str
    attempt: int
    reason: str
    measured: Measured | None = None


@dataclass(frozen=True)
class Record:
    """One version. `state` is STAGED, VERIFIED or REJECTED.

    `digest` finds its manifest. `base_version`: the base of its delta; -1: it is whole. `epoch`: the collective group
    it is sent to; 0: to none. `rollback`: number of the rollback that is about to make it LIVE again and needs its
    files. `collected`: its files may be gone.
    """

    version: int
    step: int
    digest: str
    state: VersionState
    reason: str = ""
    has_tensors: bool = True
    has_canary: bool = False
    base_version: int = -1
    epoch: int = 0
    was_live: bool = False
    pinned: bool = False
    collected: bool = False
    rollback: int = 0
    measured: Measured | None = None
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class Claim:
    """The trainer that has the run, or had it: `lease_id` is empty after a release. Numbers rise with every claim."""

    number: int = 0
    trainer_id: str = ""
    lease_id: str = ""
    pid: int = 0
    host: str = ""
    renewed_at: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """The explorer that is to compute a version's canary. `attempt` counts all candidates of the run."""

    version: int = -1
    explorer_id: str = ""
    lease_id: str = ""
    attempt: int = 0
    deadline_at: float = 0.0


@dataclass(frozen=True)
class Capabilities:
    """An explorer's capabilities, as it reports them."""

    transports: tuple[str, ...] = ()
    dtype: str = ""
    tensor_parallel_size: int = 1
    engines: int = 1
    zone: str = ""
    platform: str = ""


@dataclass(frozen=True)
class Platform:
    """The platform on which the samples of a reproducible run depend, with its first explorer; both empty before."""

    platform: str = ""
    explorer_id: str = ""


@dataclass(frozen=True)
class Member:
    """One explorer, as of its last report. Times are Unix seconds."""

    explorer_id: str
    lease_id: str
    pid: int
    host: str
    address: str
    base_model: str
    capabilities: Capabilities = field(default_factory=Capabilities)
    version: int = -1
    state: int = int(ExplorerState.STARTING)  # a newer explorer may report others
    tokens_per_second: float = 0.0
    tokens_generated: int = 0
    last_pause_seconds: float = 0.0
    transport: str = ""
    failure: str = ""
    canary_max_error: float = 0.0
    reported_at: float = 0.0


def encode_member(member: Member) -> bytes:
    """Encodes without the deep copy of `encode`: a thousand members report at once."""
    return json.dumps({**vars(member), "capabilities": vars(member.capabilities)}).encode()


def decode_or_new(kind: Callable[..., Kind], value: bytes) -> Kind:
    """Decodes an entry; an empty value is that of a new run."""
    return decode(kind, value) if value else kind()
