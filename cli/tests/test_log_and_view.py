"""`trinity log` and `trinity view`: what is shown, in which order, and how little is read for it."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from trinity.cli import tail
from trinity.cli import view as view_module
from trinity.cli.errors import RunError
from trinity.cli.log import show
from trinity.cli.tail import GrowingFile, lines_backwards, lines_forwards, visible, whole_end
from trinity.cli.view import view

_START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC).timestamp()
_LIMIT_SECONDS = 30.0


def entry(second: float, event: str, level: str = "info", **fields: object) -> str:
    moment = datetime.fromtimestamp(_START + second, UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({**fields, "event": event, "service": "x", "level": level, "logger": "l", "time": moment}) + "\n"


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(lines)
    return path


def events(text: str) -> list[str]:
    """The event of each line shown."""
    return [line.split()[3] for line in text.splitlines()]


class Counting(io.FileIO):
    """A file that counts what is read of it."""

    bytes_read = 0

    def read(self, size: int | None = -1) -> Any:
        data = super().read(size)
        Counting.bytes_read += len(data or b"")
        return data


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


def test_a_file_that_is_truncated_or_made_anew_is_read_from_its_start(tmp_path: Path) -> None:
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
    code = "import sys; from pathlib import Path; from trinity.cli.log import show; "
    code += f"show(Path(sys.argv[1]), '', {lines}, {follow}, 'info')"
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


# trinity view


def experience(step: int, task: str = "gsm8k/0/3/3", rollout: int = 0, **fields: object) -> str:
    row = {
        "step": step,
        "task_id": task,
        "ordinal": 4,
        "rollout": rollout,
        "reward": 1.0,
        "advantage": 0.5,
        "versions": [[step - 1, 0, 80]],
        "staleness": 1,
        "prompt_tokens": 33,
        "response_tokens": 80,
        "truncation": "none",
        "metrics": {"accuracy": 1.0},
        "log_sequence": 812,
        "prompt": "What is 1+1?",
        "response": "It is 2.",
    }
    return json.dumps({**row, **fields}) + "\n"


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Path]:
    """Writes the file of a job and returns the job's folder."""

    def make(*lines: str, stage: str = "") -> Path:
        write(tmp_path / stage / "buffer/experience_buffer.jsonl", *lines)
        return tmp_path

    return make


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(view_module.shutil, "get_terminal_size", lambda fallback: os.terminal_size(fallback))


def rows(folder: Path, step: int | None = None, index: int | None = None, task: str = "") -> list[dict[str, Any]]:
    found = json.loads(view(folder, step, index, task, True))
    assert isinstance(found, list)
    return found


def test_the_newest_step_is_a_table(job: Callable[..., Path]) -> None:
    folder = job(
        experience(1),
        experience(2, reward=0.0),
        experience(2, rollout=1, versions=[[0, 0, 57], [1, 57, 80]], truncation="length", response="one\ntwo"),
    )
    text = view(folder, None, None, "", False)
    title, *_ = text.splitlines()
    assert title.strip() == "step 2: 2 experiences, mean reward 0.500"
    assert max(map(len, text.splitlines())) == 120
    flat = " ".join(text.split())
    assert "0:0-57" in flat
    assert "1:57-80" in flat
    assert r"one\ntwo" in flat
    assert "33+80" in flat
    assert "length" in flat
    assert "12" not in title


def test_steps_tasks_and_numbers_are_those_asked_for(job: Callable[..., Path]) -> None:
    folder = job(
        *(experience(step, task, rollout) for step in (1, 2, 12) for task in ("math/7", "gsm/7") for rollout in (0, 1))
    )
    assert [row["step"] for row in rows(folder)] == [12] * 4
    assert [(row["task_id"], row["rollout"]) for row in rows(folder, 1)] == [
        ("math/7", 0),
        ("math/7", 1),
        ("gsm/7", 0),
        ("gsm/7", 1),
    ]
    assert [row["task_id"] for row in rows(folder, 2, None, "gsm")] == ["gsm/7"] * 2
    assert rows(folder, 2, 3) == [rows(folder, 2)[3]]
    table = view(folder, 2, None, "gsm", False)
    assert "2 of 4 experiences" in table
    assert re.findall(r"^(\d) ", table, re.MULTILINE) == ["2", "3"]


def test_a_step_trained_again_counts_as_it_was_the_last_time(job: Callable[..., Path]) -> None:
    first = [experience(step, "t", rollout, reward=0.0) for step in (10, 11, 12) for rollout in (0, 1, 2)]
    again = [experience(11, "t", rollout, reward=1.0) for rollout in (0, 1, 2)]
    cut = experience(12, "t", 9)[:80] + "\n"
    twelve = [experience(12, "t", rollout, reward=2.0) for rollout in (1, 0)]
    folder = job(*first, *again)
    assert [row["reward"] for row in rows(folder)] == [1.0] * 3  # what was trained last, not what is highest
    assert [row["reward"] for row in rows(folder, 12)] == [0.0] * 3
    job(*twelve, cut, experience(12, "t", 1, reward=3.0), experience(12, "t", 5)[:50])
    assert [(row["rollout"], row["reward"]) for row in rows(folder)] == [(0, 2.0), (1, 3.0)]
    assert rows(folder) == rows(folder, 12)
    assert [row["reward"] for row in rows(folder, 11)] == [1.0] * 3
    assert [row["reward"] for row in rows(folder, 10)] == [0.0] * 3


def test_nothing_a_model_wrote_reaches_the_terminal_as_control(job: Callable[..., Path]) -> None:
    evil = "\x1b[2J[bold]loud[/bold]\x07\u202e\ud800\x7f\r[/]"
    folder = job(
        experience(3, f"task{evil}", prompt=f"p{evil}\nnext", response=evil, metrics={evil: 1}, truncation=evil)
    )
    for text in (view(folder, None, None, "", False), view(folder, 3, 0, "", False), view(folder, 3, None, "", True)):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", text)
    whole = view(folder, 3, 0, "", False)
    assert "p\\x1b[2J[bold]loud[/bold]\\x07\\u202e\\ud800\\x7f\\r[/]\nnext" in whole
    assert rows(folder)[0]["response"] == evil


def test_one_experience_is_shown_whole(job: Callable[..., Path]) -> None:
    response = "\n".join(f"line {number}\tend" for number in range(300))
    folder = job(experience(3), experience(3, rollout=1, response=response, versions=[[1, 0, 9], [2, 9, 80]]))
    text = view(folder, None, 1, "", False)
    assert text.endswith(f"--- response: 80 tokens ---\n{response}")
    assert "What is 1+1?" in text
    for key, value in {"versions": "1:0-9 2:9-80", "log_sequence": "812", "metrics": '{"accuracy": 1.0}'}.items():
        assert re.search(rf"^  {key} +{re.escape(value)}$", text, re.MULTILINE)


def test_offline_experience_has_no_versions(job: Callable[..., Path]) -> None:
    folder = job(experience(3, versions=[], reward=0.0, advantage=0.0))
    assert "mean reward 0.000" in view(folder, None, None, "", False)
    assert re.search(r"^  versions +-$", view(folder, None, 0, "", False), re.MULTILINE)


def test_the_stage_trained_last_is_shown(job: Callable[..., Path]) -> None:
    folder = job(experience(7), stage="sft")
    job(experience(2), stage="rft")
    os.utime(folder / "sft/buffer/experience_buffer.jsonl", (1, 1))
    assert rows(folder)[0]["step"] == 2


def test_what_is_not_there_is_said(job: Callable[..., Path], tmp_path: Path) -> None:
    for _ in range(2):  # no file, then one without a whole line
        with pytest.raises(RunError, match=r"no experience is kept in .*buffer\.save_experiences"):
            view(tmp_path, None, None, "", False)
        folder = job(experience(5)[:60])
    job("\n", experience(5), experience(9), experience(8))
    for step in (4, 6, 10):
        with pytest.raises(RunError, match=rf"no experience of step {step}; there are steps 5 to 9"):
            view(folder, step, None, "", False)
    for index in (-1, 1):
        with pytest.raises(RunError, match="there are 0 to 0"):
            view(folder, 5, index, "", False)
    with pytest.raises(RunError, match="one of them is 'gsm8k/0/3/3'"):
        view(folder, 5, None, "math", False)


def test_the_newest_step_of_a_big_file_needs_few_bytes(
    job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "x" * 20_000
    folder = job(*(experience(step, rollout=rollout, response=long) for step in range(200) for rollout in range(8)))
    path = view_module.find_file(folder)
    assert path.stat().st_size > 30_000_000

    class CountingPath:
        def open(self, *_: object, **__: object) -> Counting:
            Counting.bytes_read = 0
            return Counting(path)

    monkeypatch.setattr(view_module, "find_file", lambda _: CountingPath())
    assert len(rows(folder)) == 8
    assert Counting.bytes_read < 1_000_000
    assert [row["step"] for row in rows(folder, 150)] == [150] * 8
