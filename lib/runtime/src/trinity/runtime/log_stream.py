"""Publishes a service's log lines in a stream of the run, which `trinity log` reads from any machine.

A service never waits for NATS: a bounded queue holds the lines until a thread sends them over a second connection,
several in one message. Lines that find no room are counted; the service's log file still has them. The buffer creates
the stream, which drops its oldest messages when it is full.
"""

import asyncio
import contextvars
import json
import logging
import threading
from collections import deque

import structlog

from trinity.runtime import logs, names
from trinity.runtime.broker import Broker, PublishRefused, StreamSpec, connect, credentials, new_message_id
from trinity.runtime.errors import Unavailable
from trinity.runtime.metrics import Counter
from trinity.runtime.names import IS_RUN, RunNames
from trinity.runtime.settings import NatsSettings
from trinity.runtime.trust.nats_users import read_user
from trinity.runtime.trust.roles import Role

log = structlog.get_logger(__name__)

MAX_LINES = 4096
MAX_LINE_BYTES = 16 * 1024
_MESSAGE_BYTES = 128 * 1024
_PAUSE_SECONDS = 0.5
_CONNECT_SECONDS = 10.0
_AGAIN_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
_KEPT = ("time", "level", "event", "service", "logger", "process", "trace_id")  # of a line that is too long
_KEPT_CHARACTERS = 1000

DROPPED = Counter("trinity_log_lines_dropped", "Log lines that did not reach the run's stream on NATS")


def stream_spec(run: RunNames, *, mib: int, hours: float, replicas: int) -> StreamSpec:
    """The stream of a run's lines: the oldest go when it holds `mib` MiB, and after `hours`."""
    return StreamSpec(
        run.lines_stream,
        (run.subjects("lines"),),
        max_bytes=mib * 2**20,
        max_age_seconds=hours * 3600,
        replicas=replicas,
    )


_senders: list["LineSender"] = []


def start(settings: NatsSettings, service: str, run: str, process: str) -> None:
    """Send the lines of this process until `stop`, unless the settings say that they stay here.

    `run`: its id; empty for a service of several runs: then that of log_run or of the credentials, if they are of one,
    and for sync the run that a line names. `process`: its name in the run; an explorer's is that of its credentials.
    Raises InvalidInput for a file of credentials that is none.
    """
    if not settings.sends_lines:
        return
    creds = credentials()
    own = settings.log_run or run or (read_user(creds).run if creds is not None else "")
    by_line = service == Role.SYNC
    if own or by_line:
        _senders.append(LineSender(settings.nats_url, service, own, process, by_line=by_line))
        _senders[-1].start()


def stop() -> None:
    """Sends the queued lines, for a second at most."""
    while _senders:
        _senders.pop().stop()


class LineSender(logging.Handler):
    """Queues each line of this process. `by_line`: a line that names a run belongs to that one."""

    def __init__(self, url: str, service: str, run: str, process: str, *, by_line: bool = False) -> None:
        super().__init__()
        self.setFormatter(logs.json_formatter(process=process))
        self._url, self._service, self._run, self._by_line = url, service, run, by_line
        self._owner = names.owner_of(process)
        self._name = f"trinity-{service}-lines"
        self._lines: deque[tuple[str, bytes]] = (
            deque()
        )  # append and popleft need no lock, which a fork could leave held
        self._dropped = 0
        self._stopping = threading.Event()
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(asyncio.run, self._work()), name=self._name, daemon=True
        )

    def start(self) -> None:
        logging.getLogger().addHandler(self)
        self._thread.start()

    def stop(self) -> None:
        logging.getLogger().removeHandler(self)
        self._stopping.set()
        self._thread.join(_CLOSE_SECONDS)

    def emit(self, record: logging.LogRecord) -> None:
        run = record.msg.get("run") if self._by_line and isinstance(record.msg, dict) else None
        run = run if isinstance(run, str) and IS_RUN.fullmatch(run) else self._run
        if not run:
            return
        if len(self._lines) >= MAX_LINES:
            self._drop(1)
            return
        try:
            self._lines.append((run, _short(self.format(record).encode(errors="replace"))))
        except Exception:
            self._drop(1)

    def _drop(self, lines: int) -> None:
        DROPPED.inc(lines)
        assert self.lock is not None
        with self.lock:
            self._dropped += lines

    async def _work(self) -> None:
        said = ""
        while not self._stopping.is_set():
            try:
                async with await connect(self._url, self._name, wait_seconds=_CONNECT_SECONDS) as broker:
                    await self._send_all(broker)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                if problem != said:
                    log.warning("log.lines.unsent", reason=problem)
                said = problem
                await asyncio.sleep(0 if self._stopping.is_set() else _AGAIN_SECONDS)

    async def _send_all(self, broker: Broker) -> None:
        """Until this is to stop and nothing is queued."""
        told = 0
        while not (self._stopping.is_set() and not self._lines):
            while self._lines:
                run, lines = self._next()
                await self._send(broker, run, lines)
            if self._dropped > told:
                log.warning("log.lines.dropped", lines=self._dropped - told)
                told = self._dropped
            if not self._stopping.is_set():
                await asyncio.sleep(_PAUSE_SECONDS)

    def _next(self) -> tuple[str, list[bytes]]:
        """The first queued lines that are of one run, as many as a message may have."""
        run, first = self._lines.popleft()
        lines, size = [first], len(first)
        while self._lines and self._lines[0][0] == run and size + len(self._lines[0][1]) < _MESSAGE_BYTES:
            lines.append(self._lines.popleft()[1])
            size += len(lines[-1]) + 1
        return run, lines

    async def _send(self, broker: Broker, run: str, lines: list[bytes]) -> None:
        """Store a message, once. Of this process's own run it waits for as long as NATS has no stream or no room."""
        subject, message_id = RunNames(run).line(self._service, self._owner), new_message_id()
        data = b"\n".join(lines)
        while True:
            try:
                await broker.publish(subject, data, message_id=message_id, deadline_seconds=_AGAIN_SECONDS)
                return
            except (Unavailable, PublishRefused):
                if run == self._run and not self._stopping.is_set():
                    continue
            except Exception as error:  # NATS forbids the subject, or takes no such message
                log.debug("log.message.refused", error=str(error))
            self._drop(len(lines))
            return


def _short(line: bytes) -> bytes:
    """The line; a line that is too long keeps only its main fields."""
    if len(line) <= MAX_LINE_BYTES:
        return line
    fields = json.loads(line)
    kept = {key: str(fields[key])[:_KEPT_CHARACTERS] for key in _KEPT if key in fields}
    return json.dumps({**kept, "cut_bytes": len(line)}).encode()
