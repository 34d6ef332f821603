"""`trinity log`: what is shown, in which order, and how little is read for it."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from support.fakes.data.files import Counting, write
from trinity.inspect.log import show
from trinity.reading import tail
from trinity.reading.errors import RunError
from trinity.reading.render import visible
from trinity.reading.tail import GrowingFile, lines_backwards, lines_forwards, whole_end

pytestmark = pytest.mark.core

_START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC).timestamp()
_LIMIT_SECONDS = 60.0


def entry(second: float, event: str, level: str = "info", **fields: object) -> str:
    moment = datetime.fromtimestamp(_START + second, UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({**fields, "event": event, "service": "x", "level": level, "logger": "l", "time": moment}) + "\n"


def events(text: str) -> list[str]:
    """The event of each line shown."""
    return [line.split()[3] for line in text.splitlines()]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counting]:
    Counting.bytes_read = 0
    monkeypatch.setattr(tail, "_open", lambda path: Counting(path) if path.exists() else None)
    return Counting


# Reading files


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "content", [b"", b"\n", b"part", b"a\n", b"\n\na\n", b"a\nbb\n\nlonger\npart", b"x" * 50 + b"\ny\n"]
)
def test_lines_are_the_same_from_both_ends(content: bytes, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "_BLOCK", block)
    file = io.BytesIO(content)
    expected = content.split(b"\n")[:-1]
    assert list(lines_forwards(file, whole_end(file))) == expected
    assert list(lines_backwards(file, whole_end(file)))[::-1] == expected


def test_two_rotations_between_two_looks_lose_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", "1\n")
    growing = GrowingFile(path)
    write(path, "2\n")
    for number in (3, 4):
        if (tmp_path / "a.log.1").exists():
            os.replace(tmp_path / "a.log.1", tmp_path / "a.log.2")
        os.replace(path, tmp_path / "a.log.1")
        assert number == 4 or growing.new_lines() == [b"2"]  # path is missing: the middle of a rotation
        write(path, f"{number}\n")
    assert growing.new_lines() == [b"3", b"4"]
    assert growing.new_lines() == []
    assert list(growing.backwards())[::-1][-1] == b"4"


def test_a_file_that_is_truncated_or_replaced_is_read_from_its_start(tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", "1\n", "2\n")
    growing = GrowingFile(path)
    path.write_text("3\n")
    assert growing.new_lines() == [b"3"]
    path.unlink()
    assert growing.new_lines() == []
    path.write_text("4\nnot whole")
    assert growing.new_lines() == [b"4"]
    write(path, ", now it is\n")
    assert growing.new_lines() == [b"not whole, now it is"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x9b0m\x07", r"\x1b[31mred\x9b0m\x07"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\u202edetrever\ud800\u2028", r"\u202edetrever\ud800\u2028"),
        ("数学　ok é 👍", "数学　ok é 👍"),
    ],
)
def test_control_characters_are_spelt(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible("a\n\tb\r", layout=True) == "a\n\tb\\r"


# trinity log


def test_processes_and_stages_are_merged_by_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "sft/log/trainer.log", entry(0, "first"), entry(5, "sixth"))
    write(tmp_path / "rft/log/trainer.log.2", entry(1, "second"))
    write(tmp_path / "rft/log/trainer.log.1", entry(2.5, "fourth"))
    write(tmp_path / "rft/log/trainer.log", entry(6, "seventh"))
    write(tmp_path / "log/buffer.log", entry(2, "third"), entry(3, "fifth", step=4, name="a b", empty="", x=[1.5]))
    write(tmp_path / "log/nats.out", "[1] 2026/03/01 [INF] text\n")
    order = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh"]
    for lines in (0, 7, 3, 1):
        show(tmp_path, "", lines, False, "info")
        assert events(capsys.readouterr().out) == order[-lines:]
    show(tmp_path, "trainer", 0, False, "info")
    assert events(capsys.readouterr().out) == ["first", "second", "fourth", "sixth", "seventh"]
    show(tmp_path, "buffer", 1, False, "info")
    local = time.strftime("%H:%M:%S", time.localtime(_START + 3))
    assert capsys.readouterr().out == f'{local} info     buffer fifth step=4 name="a b" empty="" x=[1.5]\n'
    show(tmp_path, "nats", 5, False, "error")
    assert capsys.readouterr().out == "[1] 2026/03/01 [INF] text\n"


def test_lines_of_nats_have_an_age(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, young = (datetime.fromtimestamp(time.time() - age).strftime("%Y/%m/%d %H:%M:%S.%f") for age in (7200, 60))
    lines = [f"[7] {old} [INF] old\n", "goroutine 1\n", f"[8] {young} [INF] young\n", "goroutine 2\n"]
    write(tmp_path / "log/nats.out", *lines)
    for since, count in (("1s", 0), ("1h", 2), ("1d", 4)):
        show(tmp_path, "nats", since=since)
        assert capsys.readouterr().out == "".join(lines[4 - count :])


def test_the_least_level_counts_before_the_number_of_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    levels = ["critical", "error", "warning", "info", "debug"]
    write(tmp_path / "log/a.log", *(entry(second, level, level) for second, level in enumerate(levels)))
    for number, level in enumerate(levels[1:], 2):
        for lines in (0, 10):
            show(tmp_path, "", lines, False, level)
            assert events(capsys.readouterr().out) == levels[:number]
    show(tmp_path, "", 1, False, "error")
    assert events(capsys.readouterr().out) == ["error"]


def test_lines_that_are_no_json_stay_where_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "log/a.log", entry(1, "one"), '{"event": "cut o\n', "[3]\n", entry(3, "three"), '{"event": "half')
    write(tmp_path / "log/b.log", entry(2, "two"), "\x1b]0;title\x07\n")
    for lines in (0, 6, 5):
        show(tmp_path, "", lines, False, "warning" if lines == 6 else "info")
        shown = capsys.readouterr().out.splitlines()
        text = [line for line in shown if not re.match(r"\d\d:\d\d:\d\d ", line)]
        assert text == ['{"event": "cut o', "[3]", r"\x1b]0;title\x07"]
        assert len(shown) == {0: 6, 6: 3, 5: 5}[lines]


def test_a_logged_exception_is_shown_as_python_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = """
import sys
from pathlib import Path
import structlog
from trinity.runtime import logs
logs.configure("trainer", file=Path(sys.argv[1]))
secret = "hunter2"
try:
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise RuntimeError("no \\x1b[1m room\\nat all") from error
except RuntimeError:
    structlog.get_logger("l").exception("trainer.failed", step=3, key="a=b")
try:
    raise ExceptionGroup("several", [ValueError("inner")])
except ExceptionGroup:
    structlog.get_logger("l").exception("trainer.failed")
"""
    file = tmp_path / "log/trainer.log"
    subprocess.run([sys.executable, "-c", code, str(file)], check=True, timeout=60, stderr=subprocess.DEVNULL)
    show(tmp_path, "", 50, False, "info")
    first, *below = capsys.readouterr().out.splitlines()
    assert first.endswith(' error    trainer trainer.failed step=3 key="a=b"')
    assert below[:2] == ["    Traceback (most recent call last):", '      File "<string>", line 10, in <module>']
    text = "\n".join(below)
    assert (
        text.index("ZeroDivisionError: division by zero") < text.index("direct cause") < text.index("RuntimeError: no")
    )
    assert "\n    RuntimeError: no \\x1b[1m room\n    at all\n" in text
    assert "\n      | ValueError: inner" in text
    assert "hunter2" not in text


def test_what_cannot_be_shown_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no log in"):
        show(tmp_path, "", 50, False, "info")
    with pytest.raises(RunError, match="no log in"):
        show(tmp_path, "explorer", 50, False, "info")
    write(tmp_path / "log/trainer.out", "ImportError: no torch\n")
    with pytest.raises(RunError, match=r"what was printed is in .*trainer\.out"):
        show(tmp_path, "trainer", 50, False, "info")
    write(tmp_path / "a/log/explorer_new.log", entry(0, "x"))
    with pytest.raises(RunError, match="there are explorer_new") as unknown:
        show(tmp_path, "explorer", 50, False, "info")
    with pytest.raises(RunError, match="debug, info, warning, error") as level:
        show(tmp_path, "", 50, False, "loud")
    assert (unknown.value.code, level.value.code) == (2, 2)


def test_few_lines_of_a_big_log_need_few_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], counted: type[Counting]
) -> None:
    block = "".join(entry(second, "step", number=second) for second in range(1000)) * 100
    size = write(tmp_path / "log/trainer.log", block, entry(2000, "last")).stat().st_size
    assert size > 10_000_000
    show(tmp_path, "", 50, False, "info")
    assert len(capsys.readouterr().out.splitlines()) == 50
    assert counted.bytes_read < 500_000


def _run(folder: Path, lines: int, follow: bool, **options: Any) -> "subprocess.Popen[str]":
    """Ctrl-C is heard: a shell without job control starts what is in the background with SIGINT ignored."""
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from pathlib import Path; from trinity.inspect.log import show; "
    code += "from trinity.reading.errors import ending_well; "
    code += f"ending_well(lambda: show(Path(sys.argv[1]), '', {lines}, {follow}, 'info'))"
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_follow_sees_new_lines_new_files_rotation_and_truncation(tmp_path: Path) -> None:
    trainer = write(tmp_path / "log/trainer.log", entry(0, "zero"), entry(1, "one"))
    process = _run(tmp_path, 1, True)
    seen: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            seen.append(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()

    def until(expected: list[str]) -> None:
        deadline = time.monotonic() + _LIMIT_SECONDS
        while len(seen) < len(expected) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert events("".join(seen)) == expected

    try:
        until(["one"])
        line = entry(2, "two")
        write(trainer, line[:20])
        time.sleep(0.7)  # two looks at half a line
        write(trainer, line[20:])
        until(["one", "two"])
        write(tmp_path / "rft/log/explorer_late.log", entry(3, "three"))
        until(["one", "two", "three"])
        write(trainer, entry(4, "four"))
        os.replace(trainer, tmp_path / "log/trainer.log.1")
        write(trainer, entry(5, "five"))
        until(["one", "two", "three", "four", "five"])
        trainer.write_text("")
        time.sleep(0.7)
        write(trainer, entry(6, "six"), entry(6, "hidden", "debug"), entry(7, "seven"))
        until(["one", "two", "three", "four", "five", "six", "seven"])
        process.send_signal(signal.SIGINT)
        assert process.wait(_LIMIT_SECONDS) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
        reader.join(_LIMIT_SECONDS)


def test_a_reader_that_leaves_ends_it_quietly(tmp_path: Path) -> None:
    write(tmp_path / "log/trainer.log", *(entry(second, "x" * 200) for second in range(5000)))
    process = _run(tmp_path, 0, False)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "xxx" in process.stdout.readline()
        process.stdout.close()
        assert process.wait(_LIMIT_SECONDS) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
