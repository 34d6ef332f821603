"""State and requests that the loop's thread and the gRPC servicer exchange."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any


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

    @property
    def has_saved_all(self) -> bool:
        """True if no step runs, and the newest step has a checkpoint."""
        return self.state in ("waiting", "paused", "finished") and self.checkpoint_step == self.step


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
        self._computes = False
        self._moves = 0

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Within it the loop waits for nothing but the computation of all ranks, which calls `moved`."""
        self.moved()
        self._computes = True
        try:
            yield
        finally:
            self._computes = False

    def moved(self) -> None:
        """Notes that the computation has gone on, such as to its next micro-batch."""
        self._moves += 1

    @property
    def moves(self) -> int | None:
        """Number of calls of `moved`; None while nothing is computed."""
        return self._moves if self._computes else None

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
