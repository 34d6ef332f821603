"""State and requests that the loop's thread and the gRPC servicer exchange."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """The trainer's public status. state: one of trainer.v1.StatusResponse. nodes: machines by name, with their ranks.

    saved_step: newest step whose files are written. checkpoint_step: newest step with a complete checkpoint.
    """

    state: str = "starting"
    step: int = 0
    last_step: int = 0
    version: int = -1
    checkpoint_step: int = 0
    saved_step: int = 0
    tokens_trained: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    waiting_for: str = ""
    nodes: tuple[tuple[str, int], ...] = ()
    ledger_sha256: str = ""  # of the entry of the newest step

    @property
    def has_saved_all(self) -> bool:
        """True if no step runs, and the newest step has a checkpoint."""
        return self.state in ("waiting", "paused", "finished") and self.checkpoint_step == self.step


@dataclass(eq=False)
class _Common:
    """Work of all ranks that a thread of rank 0 waits for. looks: how often it was found where it had been before."""

    what: str
    thread: int = field(default_factory=threading.get_ident)
    looks: int = 0


class Control:
    """The loop writes progress and reads requests; the servicer does the opposite. Thread-safe.

    on_loaded: the loop calls it when the model and its checkpoint are loaded.
    """

    def __init__(self) -> None:
        self.on_loaded: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._progress = Progress()
        self._stop = threading.Event()
        self._saves = False
        self._pause = threading.Event()
        self._checkpoint = threading.Event()
        self._common: list[_Common] = []

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Within it the calling thread waits for nothing but the work of all ranks; `moved` says that it goes on."""
        work = _Common(what)
        self._common.append(work)
        try:
            yield
        finally:
            self._common.remove(work)

    def moved(self) -> None:
        """Notes that the thread's common work has gone on, such as to its next micro-batch."""
        for work in list(self._common):
            if work.thread == threading.get_ident():
                work.looks = 0

    def each(self, what: str, items: Iterable[T]) -> Iterator[T]:
        """Yields what the ranks make together, in `together`, until there is no more."""
        with self.together(what):
            for item in items:
                self.moved()
                yield item

    def look(self, looks: float) -> str:
        """Looks once more at all common work; returns what stands still since so many looks, else an empty string."""
        for work in list(self._common):
            work.looks += 1
            if work.looks >= looks:
                return work.what
        return ""

    @property
    def progress(self) -> Progress:
        with self._lock:
            return self._progress

    def update(self, **changes: Any) -> None:
        with self._lock:
            self._progress = replace(self._progress, **changes)

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self, *, saves: bool = False) -> None:
        """Ends the loop after the running step; `saves`: with a checkpoint of that step."""
        self._saves = saves
        self._stop.set()

    @property
    def saves_before_stop(self) -> bool:
        return self._saves

    @property
    def paused(self) -> bool:
        return self._pause.is_set()

    def pause(self) -> None:
        self._pause.set()

    def resume(self) -> None:
        self._pause.clear()

    def request_checkpoint(self) -> None:
        self._checkpoint.set()

    def take_checkpoint_request(self) -> bool:
        """Returns True if a checkpoint was requested since the last call."""
        requested = self._checkpoint.is_set()
        self._checkpoint.clear()
        return requested
