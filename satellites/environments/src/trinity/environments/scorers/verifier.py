"""Comparison of mathematical answers by math-verify, and matching of regular expressions, in processes that are killed
when they take too long.

math-verify passes the text to sympy, which a policy can make hang (9^{9^{9}}); its time limits work only in the main
thread. A regular expression may take for ever and lets no other thread run meanwhile. A comparison that was
cut off counts as different, and is counted; so is a comparison for which its Score call has no time left.
"""

import atexit
import json
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any, TypeVar

from trinity.runtime.errors import Unavailable
from trinity.runtime.metrics import Counter
from trinity.sdk.scoring import seconds_left

COMPARISON_SECONDS = 3.0
START_SECONDS = 60.0
WAIT_SECONDS = 60.0
MAX_CHARACTERS = 1000

CUT_OFF = Counter("trinity_environment_comparisons_cut_off_total", "Comparisons of answers that took too long")
NOT_MADE = Counter(
    "trinity_environment_comparisons_not_made_total", "Comparisons that the time of their Score call did not allow"
)


class _NoTime(Exception):
    """The Score call has to be answered now."""


class _Workers:
    """A few worker processes, started when first needed. Thread safe; `close` ends them."""

    judge = ""  # what the processes judge with

    def __init__(self, workers: int = 2, comparison_seconds: float = COMPARISON_SECONDS) -> None:
        self.comparison_seconds = comparison_seconds
        self._workers: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for _ in range(workers):
            self._workers.put(_Worker(self.judge))

    def _asked(self, *question: str) -> bool:
        """Raises Unavailable if no worker comes free or can be started: no verdict is better than a wrong one."""
        try:
            worker = self._free_worker()
            try:
                return worker.ask(question, self.comparison_seconds)
            finally:
                self._workers.put(worker)
        except TimeoutError:
            CUT_OFF.inc()
        except _NoTime:
            NOT_MADE.inc()
        return False

    def _free_worker(self) -> "_Worker":
        left = seconds_left()
        if not left:
            raise _NoTime
        try:
            return self._workers.get(timeout=min(WAIT_SECONDS, left))
        except queue.Empty:
            if left < WAIT_SECONDS:
                raise _NoTime from None
            raise Unavailable(f"{self.judge}: all workers have been busy for {WAIT_SECONDS:g} s") from None

    def close(self) -> None:
        for worker in list(self._workers.queue):
            worker.stop()


class Verifier(_Workers):
    judge = "math-verify"

    def same(self, reference: str, given: str) -> bool:
        """Tells if math-verify takes the answer for the reference. Raises Unavailable."""
        return max(len(reference), len(given)) <= MAX_CHARACTERS and self._asked(reference, given)


class Matcher(_Workers):
    judge = "re"

    def matches(self, pattern: str, text: str) -> bool:
        """Does the same as `re.match` with DOTALL and MULTILINE. Raises Unavailable."""
        return self._asked(pattern, text)


_Kind = TypeVar("_Kind", bound=_Workers)


class _Worker:
    """One process, started for its first comparison, and at once again when it had to be killed."""

    def __init__(self, judge: str) -> None:
        self._judge = judge
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._started = 0.0

    def ask(self, question: Sequence[str], seconds: float) -> bool:
        """Raises TimeoutError when it had to be killed or died, as it does at its limits; _NoTime before it began."""
        process = self._process
        if process is None or process.poll() is not None:
            self.stop()
            process = self._start()
        assert process.stdin is not None and process.stdout is not None
        if not self._ready:
            self._await_start(process.stdout)
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            return self._line(process.stdout, min(seconds, seconds_left())) == "yes"
        except (TimeoutError, OSError):
            self.stop()
            self._start()  # it loads while no comparison waits
            raise TimeoutError from None

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "trinity.environments.scorers.verify_worker", self._judge]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self._ready = False
        self._started = time.monotonic()
        # Unbuffered: closing the pipe must not write the text again that a dead worker did not read.
        self._process = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=null, env=environment)
        return self._process

    def _await_start(self, output: IO[bytes]) -> None:
        left, allowed = seconds_left(), max(self._started + START_SECONDS - time.monotonic(), 0)
        try:
            if self._line(output, min(left, allowed)) != "ready":
                raise OSError
        except (TimeoutError, OSError) as error:
            if isinstance(error, TimeoutError) and left < allowed:
                raise _NoTime from None  # it continues to load
            self.stop()
            fix = "; is it installed? pip install 'math-verify[antlr4_13_2]'" if self._judge == "math-verify" else ""
            raise Unavailable(f"the process of {self._judge} does not start{fix}") from None
        self._ready = True

    def _line(self, output: IO[bytes], seconds: float) -> str:
        """The next line. Lines are short and come one for each question, so that reading never waits within one."""
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise TimeoutError
        line = output.readline()
        if not line:
            raise OSError("the worker ended")
        return line.decode().strip()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


_lock = threading.Lock()
_shared: dict[type[_Workers], Any] = {}


def shared(kind: type[_Kind]) -> _Kind:
    """The workers of a kind that this process shares, ended with it."""
    with _lock:
        if kind not in _shared:
            _shared[kind] = kind(workers=max(2, min(8, os.cpu_count() or 2)))
            atexit.register(_shared[kind].close)
        found: _Kind = _shared[kind]
        return found
