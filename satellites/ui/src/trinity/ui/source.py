"""One stage of a run for the pages: by gRPC from a live run, else from its job folder.

The ledger of a stopped run is in its NATS store. A read-only buffer reads it, as for `trinity batch`, and locks the job
meanwhile. That buffer stays for some seconds after the last request, since it takes seconds to start.
"""

import asyncio
import contextlib
import shlex
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trinity.config import ConfigError
from trinity.config.run_record import RunRecord
from trinity.reading import job as jobs
from trinity.reading import series, status
from trinity.reading.accounts.fates import Groups
from trinity.reading.client import Buffer, NoAnswer, Sync
from trinity.reading.errors import RunError
from trinity.reading.find import AnnouncedRun, announced_now
from trinity.reading.reader import JobStage, live_buffer, live_sync, read_only_buffer
from trinity.reading.wire import Letter, VersionRow
from trinity.runtime import files
from trinity.runtime.errors import TrinityError
from trinity.runtime.trust.roles import Role
from trinity.study import view
from trinity.ui.audit import Audit
from trinity.ui.recorded import RecordedBuffer, is_recorded

Facts = dict[str, Any]

NOTES = "notes.txt"
_KEPT_SECONDS = 10.0
_READ_AT_ONCE = 500  # entries of the ledger for one page
_CACHED_STEPS = 4
_MOST_LETTERS = 2000
_MOST_VERSIONS = 200
_KINDS: dict[str, Any] = {"advantage": (int, float), "arrays": dict, "metrics": dict, "response": str}

# The identity of a process counts for the channels that it opens next, and runs have different ones.
_opening = asyncio.Lock()


class Source:
    """The readable facts of a stage. Entries of the ledger never change and are read once."""

    def __init__(self, job_stage: JobStage) -> None:
        self.job_stage = job_stage
        self.audit = Audit()
        self.groups = Groups()
        self.curves = series.Curves(self.folder)
        self._made: dict[object, Any] = {}
        self._rows: OrderedDict[int, list[view.Row]] = OrderedDict()
        self._kept: contextlib.AsyncExitStack | None = None
        self._buffer: Buffer | RecordedBuffer | None = None
        self._of_live = False
        self._asking = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None

    @property
    def folder(self) -> Path | None:
        return self.job_stage.folders[1] if self.job_stage.folders is not None else None

    @property
    def _job(self) -> Path | None:
        return self.job_stage.job if self.job_stage.folders is not None else None

    @property
    def title(self) -> str:
        return self.job_stage.name

    @property
    def option(self) -> str:
        """The option that names this stage to a `trinity` command."""
        return self.job_stage.option

    @property
    def option_of_status(self) -> str:
        """The option for `trinity status`, which shows the live stage."""
        return shlex.join(["--job", str(self._job)]) if self._job is not None else self.option

    @property
    def is_live(self) -> bool:
        if self.job_stage.folders is None:
            return self.job_stage.about is not None
        main = jobs.read_records(self.job_stage.job).get("main")
        return main is not None and main.run == self.job_stage.run

    async def follow(self, about: RunRecord | None) -> None:
        """Takes what NATS announces of this run now; None if it is not live."""
        if about == self.job_stage.about:
            return
        async with self._asking:
            await self._close()
            config = self.job_stage.config if about is None else about.config
            self.job_stage = replace(self.job_stage, about=about, config=config)

    def cached(self, key: object, make: Callable[[], Any]) -> Any:
        """Returns what `make` returned at the first call with this key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def notes(self) -> str:
        """Returns the notes that a user wrote to this run; empty without any."""
        try:
            return (self.folder / NOTES).read_text("utf-8", "replace") if self.folder is not None else ""
        except OSError:
            return ""

    def keep_notes(self, text: str) -> None:
        """Writes the notes to the folder of the stage. Raises RunError without a folder here."""
        if self.folder is None:
            raise RunError("notes are in the job folder, and this run's is on another machine")
        files.write_atomic(self.folder / NOTES, text.replace("\r\n", "\n").encode())

    async def status(self) -> Facts | None:
        """Returns the facts of `trinity status` for a live stage, else None."""
        if not self.is_live:
            return None
        async with _opening:
            if self.job_stage.about is not None:
                return await status.collect_announced(AnnouncedRun(self.job_stage.nats_url, self.job_stage.about))
            return await status.collect(self.job_stage.job)

    async def counts(self) -> Facts:
        """Returns counts as `wire.counts`.

        Also reads entries that the audit lacks, some hundreds at a time. Raises RunError.
        """
        async with self._ask() as buffer:
            found = await buffer.counts()
            first = self.audit.newest_step + 1
            for step in range(first, min(found["ledger_step"], first + _READ_AT_ONCE - 1) + 1):
                entry, account = await buffer.accounted_entry(step)
                self.audit.read(entry, account)
                self.groups.add(entry)
        return found

    async def entry(self, step: int) -> Facts:
        """Returns the ledger entry, as `trinity batch show --json` prints it. Raises RunError if there is none."""
        async with self._ask() as buffer:
            return await buffer.entry(step)

    async def attempts(self, step: int) -> dict[int, Facts]:
        """Returns the attempt that made each group of a step, by ordinal.

        Raises RunError once the log has released them.
        """
        async with self._ask() as buffer:
            return await buffer.attempts(step)

    async def letters(self) -> list[Letter]:
        """Returns dead letters, oldest first, at most _MOST_LETTERS."""
        async with self._ask() as buffer:
            return await buffer.letters(_MOST_LETTERS)

    async def letter(self, ordinal: int) -> Facts:
        """Returns all fields of one dead letter. Raises RunError if the task has none."""
        async with self._ask() as buffer:
            return await buffer.letter(ordinal)

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[Buffer]:
        """Yields the live run's buffer, as its operator. Raises RunError unless it lives."""
        async with _opening:
            jobs.identify(self._job, Role.OPERATOR)
            async with live_buffer(self.job_stage) as reader:
                if reader is None:
                    raise RunError("the run does not live; `trinity run` continues it")
                yield reader.buffer

    async def versions(self) -> list[VersionRow]:
        """Returns the newest versions, newest first. Raises RunError unless the stage is live."""
        async with self._sync() as sync:
            return await sync.versions(_MOST_VERSIONS)

    async def pin(self, number: int, pinned: bool) -> None:
        """Pins or unpins a version. Raises RunError unless the stage is live and this user is its operator."""
        async with self._sync(Role.OPERATOR) as sync:
            await sync.pin(number, pinned)

    async def version(self, number: int) -> Facts:
        """Returns all fields of one version, and the explorers that serve it.

        Raises RunError if there is none, or the stage is not live.
        """
        async with self._sync() as sync:
            found = await sync.version(number)
            return found | {"explorers": [one.name for one in await sync.members() if one.version == number]}

    async def rows(self, step: int | None) -> list[view.Row]:
        """Returns the experiences that a step was trained on, in the order of `trinity view`.

        Raises RunError if there are none.
        """
        if step is not None and step in self._rows:
            return self._rows[step]
        if self.folder is not None:
            found = await asyncio.to_thread(view.read_step, self.folder, step)
        else:
            async with _opening:
                found = await asyncio.to_thread(view.read_log, self.job_stage, step)
        found = [{name: value for name, value in row.items() if _is_sound(name, value)} for row in found]
        if not self.is_live:  # a live run may train a step again after a crash
            self._rows[found[0]["step"]] = found
            while len(self._rows) > _CACHED_STEPS:
                self._rows.popitem(last=False)
        return found

    @contextlib.asynccontextmanager
    async def _sync(self, role: Role = Role.READER) -> AsyncIterator[Sync]:
        async with _opening:
            jobs.identify(self._job, role)
            async with live_sync(self.job_stage) as sync:
                yield sync

    @contextlib.asynccontextmanager
    async def _ask(self) -> AsyncIterator[Buffer | RecordedBuffer]:
        """Queries the run's buffer, or a read-only one. One query at a time."""
        async with self._asking:
            if self._closing is not None:
                self._closing.cancel()
            if self._of_live != self.is_live:
                await self._close()
            try:
                yield self._buffer or await self._open()
            except NoAnswer:
                await self._close()  # its process may have ended
                raise
            finally:
                self._closing = asyncio.create_task(self._close_later())

    async def _open(self) -> Buffer | RecordedBuffer:
        is_live = self.is_live
        async with contextlib.AsyncExitStack() as stack, _opening:
            jobs.identify(self._job, Role.READER)
            if self.folder is not None and is_recorded(self.folder):
                found: Buffer | RecordedBuffer = RecordedBuffer(self.folder)
            else:
                reader = await stack.enter_async_context(live_buffer(self.job_stage))
                if reader is None:
                    reader = await stack.enter_async_context(read_only_buffer(self.job_stage))
                found = reader.buffer
            self._kept, self._buffer, self._of_live = stack.pop_all(), found, is_live
        return found

    async def _close_later(self) -> None:
        await asyncio.sleep(_KEPT_SECONDS)
        await self.close()

    async def close(self) -> None:
        """Ends the processes that were started for this stage."""
        async with self._asking:
            await self._close()

    async def _close(self) -> None:
        kept, self._kept, self._buffer = self._kept, None, None
        if kept is not None:
            await kept.aclose()


async def look(run: AnnouncedRun) -> RunRecord | None:
    """Returns what is announced of a run or another stage of its job; None without any, or if NATS is away."""
    async with _opening:
        jobs.identify(None, Role.READER)
        with contextlib.suppress(RunError, TrinityError):
            return await announced_now(run)
    return None


def _is_sound(name: str, value: Any) -> bool:
    """Returns True for a field of an experience that pages can compute with; others are left out."""
    if name == "versions":  # spans [version, first, end]
        return isinstance(value, list) and all(
            isinstance(one, list) and [*map(type, one)] == [int] * 3 for one in value
        )
    return isinstance(value, _KINDS.get(name, object))


# What a job folder that is damaged, half there or of another version brings about; the page says it and shows the rest.
UNREADABLE = (RunError, TrinityError, ConfigError, OSError, ValueError, LookupError, TypeError, OverflowError)
