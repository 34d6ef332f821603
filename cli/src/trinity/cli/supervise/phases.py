"""Says what a command does while it does it, with seconds."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from trinity.reading.render import clipped, visible

_LONG_SECONDS = 5.0  # after which a line without a terminal tells the end, too
_LONGEST_LINE = 79


@contextlib.contextmanager
def phase(text: str, file: TextIO | None = None) -> Iterator[None]:
    """Shows a phase until the block ends. On a terminal its line counts seconds. `file`: else standard output."""
    out = file or sys.stdout
    begin, text = time.monotonic(), visible(clipped(text, _LONGEST_LINE - len(" ... 9999 s")))
    if not out.isatty():
        _write(out, f"{text} ...\n")
        yield
        if (seconds := time.monotonic() - begin) > _LONG_SECONDS:
            _write(out, f"{text}: {seconds:.0f} s\n")
        return
    ended = threading.Event()

    def count() -> None:
        while not ended.is_set():
            _write(out, f"\r\x1b[2K{text} ... {time.monotonic() - begin:.0f} s")
            ended.wait(1.0)

    counting = threading.Thread(target=count, daemon=True)
    counting.start()
    try:
        yield
    finally:
        ended.set()
        counting.join()
        _write(out, f"\r\x1b[2K{text}: {time.monotonic() - begin:.0f} s\n")


def _write(out: TextIO, text: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that was closed, or a full disk
        out.write(text)
        out.flush()
