"""Says what a command does while it does it, with seconds: on standard error, so that results can be piped."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from trinity.reading.render import clipped, visible

_LONG_SECONDS = 5.0  # after which a line without a terminal tells the end, too
_LONGEST_LINE = 79


@contextlib.contextmanager
def phase(text: str) -> Iterator[None]:
    """Shows a phase until the block ends. A terminal has one line, whose seconds count."""
    begin, text = time.monotonic(), visible(clipped(text, _LONGEST_LINE - len(" ... 9999 s")))
    if not sys.stderr.isatty():
        _write(f"{text} ...\n")
        yield
        if (seconds := time.monotonic() - begin) > _LONG_SECONDS:
            _write(f"{text}: {seconds:.0f} s\n")
        return
    ended = threading.Event()

    def count() -> None:
        while not ended.is_set():
            _write(f"\r\x1b[2K{text} ... {time.monotonic() - begin:.0f} s")
            ended.wait(1.0)

    counting = threading.Thread(target=count, daemon=True)
    counting.start()
    try:
        yield
    finally:
        ended.set()
        counting.join()
        _write(f"\r\x1b[2K{text}: {time.monotonic() - begin:.0f} s\n")


def _write(text: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that was closed, or a full disk
        sys.stderr.write(text)
        sys.stderr.flush()
