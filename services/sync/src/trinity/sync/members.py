"""Who rolls out for a run: explorers with a lease, renewed by every report, gone when it runs out."""

import json
import time
import uuid
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trinity.runtime.broker import Bucket
from trinity.runtime.errors import AlreadyExists, InvalidInput, NotFound
from trinity.runtime.names import RunNames


@dataclass(frozen=True)
class Capabilities:
    """What an explorer can do; free of judgement."""

    transports: tuple[str, ...] = ()
    dtype: str = ""
    tensor_parallel_size: int = 1
    engines: int = 1
    zone: str = ""


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
    state: str = "starting"
    tokens_per_second: float = 0.0
    tokens_generated: int = 0
    reported_at: float = 0.0


class Members:
    """The members of one run. Leases are judged by this host's clock, which wrote the times."""

    def __init__(self, bucket: Bucket, run: str, lease_seconds: float) -> None:
        self._bucket = bucket
        self._names = RunNames(run)
        self.lease_seconds = lease_seconds

    def alive(self, member: Member) -> bool:
        return time.time() - member.reported_at < self.lease_seconds

    async def all(self) -> list[Member]:
        """Members whose lease is alive, by id."""
        entries = await self._bucket.entries(f"{self._names.run}.member")
        members = [_decode(entry.value) for entry in entries.values()]
        return sorted((m for m in members if self.alive(m)), key=lambda m: m.explorer_id)

    async def join(self, member: Member) -> Member:
        """Enter, or come back after the old lease ran out or from the same process. AlreadyExists otherwise."""
        if not member.explorer_id:
            raise InvalidInput("explorer_id", "is empty")
        joined = replace(member, lease_id=uuid.uuid4().hex, reported_at=time.time())

        def enter(value: bytes) -> bytes:
            if value:
                old = _decode(value)
                if self.alive(old) and (old.pid, old.host) != (member.pid, member.host):
                    raise AlreadyExists(
                        f"explorer_id: {member.explorer_id!r} is taken by process {old.pid} on {old.host}; "
                        "explorer.name must differ between explorers of one run"
                    )
            return _encode(joined)

        await self._bucket.update(self._names.member_key(member.explorer_id), enter)
        return joined

    async def find(self, lease_id: str) -> Member:
        """The member with a living lease. NotFound otherwise."""
        for member in await self.all():
            if member.lease_id == lease_id:
                return member
        raise NotFound("lease_id: no such lease; it ran out or was never given, join again")

    async def report(self, explorer_id: str, lease_id: str, **changes: Any) -> Member:
        """Renew the lease and note what the explorer serves. NotFound if the lease is gone."""
        reported: list[Member] = []

        def renew(value: bytes) -> bytes:
            old = _decode(value) if value else None
            if old is None or old.lease_id != lease_id or not self.alive(old):
                raise NotFound("lease_id: the lease ran out; join again")
            reported[:] = [replace(old, reported_at=time.time(), **changes)]
            return _encode(reported[0])

        await self._bucket.update(self._names.member_key(explorer_id), renew)
        return reported[0]

    async def leave(self, explorer_id: str) -> None:
        await self._bucket.delete(self._names.member_key(explorer_id))


def _encode(member: Member) -> bytes:
    return json.dumps(asdict(member)).encode()


def _decode(value: bytes) -> Member:
    fields = json.loads(value)
    capabilities = fields.pop("capabilities")
    capabilities["transports"] = tuple(capabilities["transports"])
    return Member(**fields, capabilities=Capabilities(**capabilities))
