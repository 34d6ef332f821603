"""A copy in memory of the keys under a prefix of a bucket, with compare-and-set on top of it.

The copy may be behind the bucket for a moment and decides nothing: every change is made to the newest value by
compare-and-set. Values that this process writes are in its copy at once, and so before values that others wrote
earlier. Readers of several keys wait for the earlier values with `catches_up`.
"""

import asyncio
import contextlib
from collections.abc import Callable

import nats.errors
import nats.js.errors
import structlog

from trinity.runtime.broker import ABSENT, Bucket, Change, Entry, SequenceConflict
from trinity.runtime.errors import TrinityError, Unavailable
from trinity.sync.store import clock
from trinity.weights.pointer import UNREADABLE

log = structlog.get_logger(__name__)

_AGAIN_SECONDS = 0.01
_REASON = 500  # characters
_CATCH_UP_SECONDS = 10.0
# Attempts at a value whose writers collide before an error is raised; a hundred collisions are no accident.
_ATTEMPTS = 1000


class Mirror:
    """Keys and values under one prefix. `run` keeps them up to date; `ready` is set after the first complete read.

    `keep_when_lost`: the values outlive the bucket; the next change writes them again. `check(key, value)` raises the
    problem of a value: the value before it stays, and is written again.
    """

    def __init__(
        self,
        bucket: Bucket,
        prefix: str,
        on_change: Callable[[str, bytes | None], None],
        *,
        every_seconds: float | None = None,
        keep_when_lost: bool = False,
        check: Callable[[str, bytes], None] = lambda key, value: None,
    ) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._on_change = on_change
        self._every_seconds = every_seconds
        self._keep_when_lost = keep_when_lost
        self._entries: dict[str, Entry] = {}
        self._revisions: dict[str, int] = {}  # deleted keys stay, so that older values cannot return
        self._seen_at: dict[str, float] = {}
        self._check = check
        self._damaged: set[str] = set()
        self._followed = 0  # all changes up to this revision are in the copy
        self.ready = asyncio.Event()

    async def run(self) -> None:
        async for changes in self._bucket.follow(self._prefix, self._every_seconds):
            if changes.lost:
                self._forget()
            for change in changes.changes:
                self._apply(change)
                self._followed = max(self._followed, change.revision)
            self.ready.set()
            await self._mend()

    def _forget(self) -> None:
        self._revisions.clear()
        self._followed = 0
        if self._keep_when_lost:
            self._entries = {key: Entry(entry.value, 0) for key, entry in self._entries.items()}
        else:
            for key in list(self._entries):
                del self._entries[key]
                self._on_change(key, None)

    def _apply(self, change: Change) -> None:
        if change.revision <= self._revisions.get(change.key, 0):
            return
        self._revisions[change.key] = change.revision
        if change.value is not None and not self._is_sound(change):
            self._entries[change.key] = Entry(self.known(change.key).value, change.revision)
            return
        self._seen_at[change.key] = clock.now()
        if change.value is None:
            self._entries.pop(change.key, None)
        else:
            self._entries[change.key] = Entry(change.value, change.revision)
        self._on_change(change.key, change.value)

    def _is_sound(self, change: Change) -> bool:
        try:
            self._check(change.key, change.value or b"")
        except (TrinityError, *UNREADABLE) as error:
            reason = f"{type(error).__name__}: {error}"[:_REASON]
            log.error("sync.value.refused", key=change.key, revision=change.revision, reason=reason)
            if self.known(change.key).value:
                self._damaged.add(change.key)
            return False
        return True

    async def _mend(self) -> None:
        """Writes the values before unreadable ones again, because other processes read them too."""
        for key in list(self._damaged):
            self._damaged.discard(key)
            entry = self.known(key)
            with contextlib.suppress(SequenceConflict, Unavailable):  # another process's value is read next
                if entry.value and entry.revision:
                    await self.put_if(key, entry.value, entry.revision)

    async def catches_up(self) -> bool:
        """Waits until the copy has all values older than its newest; returns True if it had. Raises Unavailable."""
        wanted = max(self._revisions.values(), default=0)
        if self._followed >= wanted:
            return True
        deadline = clock.now() + _CATCH_UP_SECONDS
        while self._followed < wanted and self._revisions:
            if clock.now() > deadline:
                raise Unavailable(f"NATS is slow to tell what lies under {self._prefix}; try again")
            await asyncio.sleep(_AGAIN_SECONDS)
        return False

    def has_all_before(self, key: str) -> bool:
        """Returns True if the copy has all values older than its value of `key`."""
        return self._followed >= self._revisions.get(key, 0)

    def forget(self, key: str) -> None:
        """Removes the value from the copy: NATS forgets values of a bucket with a TTL without telling."""
        self._entries.pop(key, None)

    def known(self, key: str) -> Entry:
        """Returns the value in the copy."""
        return self._entries.get(key, ABSENT)

    def age_seconds(self, key: str) -> float:
        """Returns the time since this process first saw the newest value, by its own clock."""
        return clock.now() - self._seen_at.get(key, clock.now())

    async def fresh(self, key: str) -> Entry:
        """Reads the value from NATS. Ignores a replica that is behind this process."""
        entry = await self._bucket.get(key)
        if entry.revision > self._revisions.get(key, 0):
            self._apply(Change(key, entry.value, entry.revision))
        known = self.known(key)
        outlived = not entry.revision and known is not ABSENT and not known.revision
        return known if outlived or known.revision >= entry.revision else entry

    async def put_if(self, key: str, value: bytes, revision: int) -> None:
        """Writes if the key is still at `revision`. Raises SequenceConflict, or Unavailable if NATS does not answer."""
        try:
            self._apply(Change(key, value, await self._bucket.put_if(key, value, revision)))
        except (TimeoutError, nats.errors.Error, nats.js.errors.Error) as error:
            raise Unavailable(f"NATS did not store {key}: {type(error).__name__} {error}") from None

    async def change(self, key: str, change: Callable[[bytes], bytes | None], *, from_known: bool = False) -> bytes:
        """Applies `change(old) -> new` atomically, again on every conflict; None from `change` leaves the value.

        `from_known` makes the first attempt on the copy. If `change` refuses it, the next attempt reads the value.
        """
        for attempt in range(_ATTEMPTS):
            by_copy = from_known and attempt == 0 and self.known(key) is not ABSENT
            entry = self.known(key) if by_copy else await self.fresh(key)
            try:
                value = change(entry.value)
            except TrinityError:
                if by_copy:
                    continue
                raise
            if value is None or value == entry.value:
                return entry.value
            with contextlib.suppress(SequenceConflict):
                await self.put_if(key, value, entry.revision)
                return value
            if attempt:
                await asyncio.sleep(_AGAIN_SECONDS)
        raise Unavailable(f"{key} changes faster than it can be changed; try again")

    async def delete_if(self, key: str, revision: int) -> None:
        """Deletes if the key is still at `revision`. Raises SequenceConflict otherwise."""
        try:
            await self._bucket.delete_if(key, revision)
        except (TimeoutError, nats.errors.Error, nats.js.errors.Error) as error:
            raise Unavailable(f"NATS did not delete {key}: {type(error).__name__} {error}") from None
        self._entries.pop(key, None)  # the deletion's revision is still to be read

    async def purge(self, key: str) -> None:
        """Removes the former values of a deleted key from NATS."""
        await self._bucket.purge(key)
        self._seen_at.pop(key, None)
