"""Mirrors the buffer's log to archives. Archives lag behind the log and never delay it."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path

import structlog

from trinity.archive.open import Archive, open_archive
from trinity.buffer.log.reader import LogReader, check_owner, processed
from trinity.buffer.operators.pipeline import Pipeline
from trinity.buffer.state.context import RunContext
from trinity.config.schema.pipeline import OperatorConfig
from trinity.data.experience import Group, TaskKind
from trinity.runtime.broker import Message, tail
from trinity.runtime.errors import Conflict, InvalidInput, Unavailable

log = structlog.get_logger(__name__)

_MOST_GROUPS = 64
_GATHER_SECONDS = 0.5
# A group that comes twice comes twice soon: its explorer had no answer from the log.
_REMEMBERED = 65_536
_RETRY_SECONDS = 5.0


class Mirror:
    """One archive. `position` is the log sequence up to which it holds everything; the log is not purged above it.

    The first group of every task is archived, with `operators` as they left it. An archive that cannot be written is
    tried again: the log keeps what it does not hold yet.
    """

    def __init__(
        self, context: RunContext, reader: LogReader, path: str, name: str, operators: list[OperatorConfig]
    ) -> None:
        self._context = context
        self._reader = reader
        self._path = path
        self._name = name
        self._pipeline = Pipeline(operators)
        self._archive: Archive | None = None
        self._groups: list[tuple[int, Group]] = []
        self._seen: OrderedDict[int, None] = OrderedDict()
        self.position = 0

    async def open(self) -> None:
        self._archive = await asyncio.to_thread(open_archive, self._path, self._name, self._context.run)
        state = await self._context.broker.state(self._context.names.experiences_stream)
        self.position = await asyncio.to_thread(self._archive.position)
        if self.position > state.last_sequence:
            raise Conflict(
                f"the archive {self._name} holds run {self._context.run} up to log entry {self.position}, but the log "
                f"ends at {state.last_sequence}: it is of an earlier log of this name. Move it away, or name another"
            )
        if self.position + 1 < state.first_sequence:
            log.warning("buffer.archive.truncated", name=self._name, below=state.first_sequence, has=self.position)
            self.position = state.first_sequence - 1

    async def run(self) -> None:
        sequence = self.position
        async for message in _with_pauses(self._context, self.position):
            if message is not None:
                sequence = message.sequence
                await self._take(message)
            if sequence > self.position and (message is None or len(self._groups) >= _MOST_GROUPS):
                await self._store(sequence)

    async def _take(self, message: Message) -> None:
        try:
            entry = await self._reader.take(message)
            if entry.kind != "group" or entry.task.fields.run != self._context.run:
                return
            check_owner(self._context.names, message.subject, entry)
            stored = entry.summary(message.sequence, self._context.limits)
            group = entry.group()
            key = group.task.ordinal
            if key in self._seen or group.task.kind is not TaskKind.TRAIN:
                return
            if self._pipeline.names:
                stored, dropped_by = processed(stored, self._pipeline.run(group))
                if dropped_by:
                    return
                group = group.as_kept(stored.kept)
        except InvalidInput:
            return  # the ledger's writer reports the problem
        self._seen[key] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        self._groups.append((message.sequence, group))

    async def _store(self, position: int) -> None:
        assert self._archive is not None
        while True:
            try:
                await asyncio.to_thread(self._archive.append, self._groups, position)
                break
            except (Unavailable, OSError) as error:
                log.warning("buffer.archive.retried", name=self._name, reason=str(error), groups=len(self._groups))
                await asyncio.sleep(_RETRY_SECONDS)
        self._groups.clear()
        self.position = position


async def _with_pauses(context: RunContext, after: int) -> AsyncIterator[Message | None]:
    """The log's messages; None when no further one came for a moment."""
    messages: asyncio.Queue[Message] = asyncio.Queue(maxsize=4 * _MOST_GROUPS)

    async def read() -> None:
        async for message in tail(context.broker, context.names.experiences_stream, after):
            await messages.put(message)

    reading = asyncio.create_task(read())
    try:
        while True:
            try:
                yield await asyncio.wait_for(messages.get(), _GATHER_SECONDS)
            except TimeoutError:
                if reading.done():
                    reading.result()  # raises: it never ends by itself
                yield None
    finally:
        reading.cancel()


def open_mirrors(context: RunContext, reader: LogReader) -> list[Mirror]:
    """Opens the archives of the YAML: the log after the operators, and before them."""
    source, pipeline = context.plan.experience_buffer, context.plan.config.data_processor.experience_pipeline
    folder, mirrors = context.plan.job_dir / "buffer", []
    if source.path is not None:
        mirrors.append(Mirror(context, reader, in_folder(source.path, folder), source.name, pipeline.operators))
    if pipeline.input_save_path is not None:
        mirrors.append(Mirror(context, reader, in_folder(pipeline.input_save_path, folder), "pipeline_input", []))
    return mirrors


def in_folder(path: str, folder: Path) -> str:
    """Resolves an archive's path or sqlite URL; a relative path is below the job folder, so every job has its own."""
    scheme, found, rest = path.partition("://")
    if not found:
        place = Path(path).expanduser()
        return path if place.is_absolute() else f"{folder / place}{'/' if path.endswith('/') else ''}"
    if scheme.partition("+")[0] == "sqlite" and rest.startswith("/") and not rest.startswith("//"):
        return f"{scheme}:///{folder / rest[1:]}"
    return path
