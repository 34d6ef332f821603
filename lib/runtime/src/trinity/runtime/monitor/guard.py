"""Wrappers that protect a run from a backend that raises or hangs."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import structlog

from trinity.runtime.monitor.options import Backend

log = structlog.get_logger(__name__)

QUEUE_CALLS = 1000
RETRY_SECONDS = 60.0  # the first time; then twice as long each time, up to:
LONGEST_RETRY_SECONDS = 960.0
CLOSE_SECONDS = 10.0
COMPLAINT_SECONDS = 60.0


class Complaints:
    """Warnings about one backend, each kind of them once per minute and with the count since the last."""

    def __init__(self, kind: str, hide: Callable[[str], str]) -> None:
        self.kind = kind
        self._hide = hide
        self._counts: dict[str, int] = {}
        self._quiet_until: dict[str, float] = {}

    def failed(self, error: BaseException) -> None:
        self._warn("runtime.monitor.failed", error=self._hide(f"{type(error).__name__}: {error}"))

    def dropped(self) -> None:
        self._warn("runtime.monitor.dropped", reason="the queue is full; the JSON lines have them")

    def left(self, unsent: int, hanging: bool) -> None:
        """The final warning, with the counts since the last ones; none without failures."""
        counts = {event.rsplit(".", 1)[1]: count for event, count in self._counts.items()}
        if unsent or hanging or counts:
            log.warning("runtime.monitor.left", kind=self.kind, unsent=unsent, hanging=hanging, **counts)

    def _warn(self, event: str, **fields: str) -> None:
        self._counts[event] = self._counts.get(event, 0) + 1
        now = time.monotonic()
        if now >= self._quiet_until.get(event, 0.0):
            self._quiet_until[event] = now + COMPLAINT_SECONDS
            log.warning(event, kind=self.kind, count=self._counts.pop(event), **fields)


class Guarded:
    """A backend called in the caller's thread; its errors are caught."""

    def __init__(self, backend: Backend, complaints: Complaints) -> None:
        self._backend = backend
        self._complaints = complaints

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        try:
            self._backend.log(metrics, step)
        except Exception as error:
            self._complaints.failed(error)

    def close(self) -> None:
        try:
            self._backend.close()
        except Exception as error:
            self._complaints.failed(error)


class Background:
    """A backend opened, called and closed in its own thread; `log` never waits.

    At most `queue_calls` calls wait; the oldest gives way. Opening is tried until it succeeds, first again after
    `retry_seconds`.
    """

    def __init__(
        self,
        open_backend: Callable[[], Backend],
        complaints: Complaints,
        queue_calls: int = QUEUE_CALLS,
        retry_seconds: float = RETRY_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._open = open_backend
        self._complaints = complaints
        self._retry_seconds = retry_seconds
        self._close_seconds = close_seconds
        self._calls: deque[tuple[Mapping[str, float], int]] = deque(maxlen=queue_calls)
        self._changed = threading.Condition()
        self._closing = False
        # A daemon: a hanging backend must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"monitor-{complaints.kind}", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        with self._changed:
            if self._closing:
                return
            if len(self._calls) == self._calls.maxlen:
                self._complaints.dropped()
            self._calls.append((metrics, step))
            self._changed.notify_all()

    def close(self) -> None:
        """Send what waits, for `close_seconds` at most."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(self._close_seconds)
        self._complaints.left(len(self._calls), hanging=self._thread.is_alive())

    def _work(self) -> None:
        backend = self._opened()
        if backend is None:
            return
        guarded = Guarded(backend, self._complaints)
        while call := self._next():
            guarded.log(*call)
        guarded.close()

    def _opened(self) -> Backend | None:
        """Open the backend, with retries. None if it was closed first."""
        wait_seconds = self._retry_seconds
        while True:
            try:
                return self._open()
            except (Exception, SystemExit) as error:  # some clients exit if they are refused
                self._complaints.failed(error)
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, wait_seconds):
                    return None
            wait_seconds = min(2 * wait_seconds, LONGEST_RETRY_SECONDS)

    def _next(self) -> tuple[Mapping[str, float], int] | None:
        """The oldest call; None once it is closed and all is sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._closing)
            return self._calls.popleft() if self._calls else None
