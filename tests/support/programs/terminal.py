"""A command at a terminal of its own: what it wrote, what a person sees of it, and what that person types."""

import codecs
import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_ESCAPE = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])")


class Screen:
    """The lines that a terminal shows after a text, those that scrolled away included.

    It knows the sequences that `trinity` writes: up, down, erase the line, erase what is below.
    """

    def __init__(self, columns: int) -> None:
        self.lines: list[str] = [""]
        self.wrapped = 0  # lines that did not fit
        self._columns, self._row, self._column = columns, 0, 0

    def write(self, text: str) -> None:
        place = 0
        while place < len(text):
            if found := _ESCAPE.match(text, place):
                self._obey(int(found[1] or 1) if found[1].isdecimal() or not found[1] else 1, found[2], found[1])
                place = found.end()
                continue
            self._put(text[place])
            place += 1

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._down(1)
        elif character in "\x07\x1b":
            return
        else:
            if self._column == self._columns:
                self.wrapped += 1
                self._column = 0
                self._down(1)
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1

    def _down(self, count: int) -> None:
        self._row += count
        self.lines += [""] * (self._row + 1 - len(self.lines))

    def _obey(self, count: int, letter: str, given: str) -> None:
        if letter == "A":
            self._row = max(0, self._row - count)
        elif letter == "B":
            self._down(count)
        elif letter == "K":
            line = self.lines[self._row]
            self.lines[self._row] = "" if given == "2" else line[: self._column]
        elif letter == "J":
            self.lines[self._row] = self.lines[self._row][: self._column]
            del self.lines[self._row + 1 :]


class Terminal:
    """A command whose input and output are a terminal of `columns` x `lines`. Use it as a context manager."""

    def __init__(
        self, command: Sequence[str], folder: Path, columns: int = 80, lines: int = 50,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._columns = columns
        self._text, self._at = "", 0
        self._news = threading.Condition()
        self._terminal, shown = pty.openpty()
        fcntl.ioctl(shown, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        given = {**(environment if environment is not None else os.environ), "TERM": "xterm-256color"}
        own = {name: value for name, value in given.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command, cwd=folder, env=own, stdin=shown, stdout=shown, stderr=shown, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(shown)
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        self.process.kill()
        self.process.wait(10)
        os.close(self._terminal)

    @property
    def text(self) -> str:
        """Everything that was written so far, with the sequences that move the cursor."""
        with self._news:
            return self._text

    def screen(self) -> Screen:
        screen = Screen(self._columns)
        screen.write(self.text)
        return screen

    def expect(self, pattern: str, seconds: float) -> "re.Match[str]":
        """Waits for a text behind the last expected one. Fails with the screen."""
        deadline = time.monotonic() + seconds
        with self._news:
            while not (found := re.compile(pattern).search(self._text, self._at)):
                left = deadline - time.monotonic()
                ended = self.process.poll() is not None
                if left <= 0 or (ended and not self._news.wait(1.0)):
                    how = f"the command ended with {self.process.poll()}" if ended else f"not within {seconds:g} s"
                    shown = "\n".join(_lines_of(self._text, self._columns)[-40:])
                    raise AssertionError(f"{how}: {pattern}; the screen:\n{shown}")
                self._news.wait(min(left, 1.0))
            self._at = found.end()
            return found

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.type("\x03")

    def ended(self, seconds: float) -> int:
        """Returns the exit code, and what is left of the output is read."""
        code = self.process.wait(seconds)
        time.sleep(0.2)
        return code

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while True:
            try:
                data = os.read(self._terminal, 65536)
            except OSError:  # the last process closed the terminal
                break
            if not data:
                break
            with self._news:
                self._text += decoder.decode(data)
                self._news.notify_all()


def _lines_of(text: str, columns: int) -> list[str]:
    screen = Screen(columns)
    screen.write(text)
    return screen.lines
