"""The log lines that a run's services send to NATS (trinity.runtime.log_stream), as `trinity log` reads them.

They are read by sequence, without a consumer: that changes nothing on NATS, and a reader may do it. A process says its
name in each line; the subject, which NATS checks, says its service and whether the name is its own.
"""

import dataclasses
from collections.abc import Iterator

from trinity.cli.commands.log_entry import Entry, Wanted, parse
from trinity.cli.errors import RunError
from trinity.runtime.broker import Broker, StoredMessage
from trinity.runtime.errors import NotFound
from trinity.runtime.names import RunNames, owner_of

_BLOCK = 256  # messages; each has the lines of half a second


class RunLines:
    """The lines of one run that were asked for. `open` reads what is there, `new` what came since."""

    def __init__(self, broker: Broker, run: str, wanted: Wanted) -> None:
        self._broker, self._wanted = broker, wanted
        self._stream = RunNames(run).lines_stream
        self._next = 1

    async def open(self, lines: int) -> list[Entry]:
        """The last `lines` entries, 0: all, in the order of time. RunError if NATS has no lines of the run."""
        try:
            state = await self._broker.state(self._stream)
        except NotFound:
            raise RunError(f"NATS has no log of the run: no stream {self._stream}") from None
        self._next = end = state.last_sequence + 1
        found: list[Entry] = []
        while end > state.first_sequence and not 0 < lines <= len(found):
            begin = max(state.first_sequence, end - _BLOCK)
            block = [entry for message in await self._read(begin, end) for entry in _entries(message)]
            found = [*filter(self._wanted.has, block), *found]
            if block and max(entry.time or 0.0 for entry in block) < self._wanted.since:
                break
            end = begin
        return sorted(found, key=Entry.order)[-lines:]

    async def new(self) -> list[Entry]:
        """What was stored since the last call, in the order of time."""
        messages = await self._read(self._next, self._next + _BLOCK)
        if messages:
            self._next = messages[-1].sequence + 1
        entries = [entry for message in messages for entry in _entries(message)]
        return sorted(filter(self._wanted.has, entries), key=Entry.order)

    async def _read(self, begin: int, end: int) -> list[StoredMessage]:
        """Messages from `begin` to before `end` that are still there."""
        found: list[StoredMessage] = []
        while begin < end:
            part = await self._broker.several(self._stream, begin, end - begin)
            found += (message for message in part if message.sequence < end)
            if not part:
                break
            begin = part[-1].sequence + 1
        return found


def _entries(message: StoredMessage) -> Iterator[Entry]:
    service, owner = message.subject.split(".")[3:5]
    for line in message.data.split(b"\n"):
        entry = parse(line, service)
        name = entry.fields.get("process")
        if not isinstance(name, str) or owner_of(name) != owner:
            name = f"{service}/{owner}"
        yield dataclasses.replace(entry, process=name, service=service)
