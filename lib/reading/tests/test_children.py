"""Supervised processes: restarted, failed for good with their last error, ended with their process group."""

import asyncio
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import structlog

from trinity.reading import children
from trinity.reading.children import Child, stop_all
from trinity.runtime import waits
from trinity.runtime.errors import EXIT_AGAIN, EXIT_FOR_GOOD, EXIT_UNEXPECTED

pytestmark = pytest.mark.core

FINISHES = """
import json, os
from pathlib import Path
Path({file!r}).write_text(json.dumps({{"pid": os.getpid(), "finished": True}}))
"""


def finishing(folder: Path, then: str) -> str:
    """Code of a process that says that its work is finished, and then ends."""
    return FINISHES.format(file=str(folder / "child.announced.json")) + then


def make(folder: Path, code: str, **options: object) -> Child:
    return Child(
        name="child",
        service="test",
        command=[sys.executable, "-c", code],
        environment={},
        address="",
        log_file=folder / "child.log",
        **options,  # type: ignore[arg-type]
    )


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_BACKOFF_SECONDS", (0.01, 0.05))


def test_a_child_is_told_which_process_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_PARENT_PID", "1")  # that process's own parent
    child = make(tmp_path, "import os; print(os.environ['TRINITY_PARENT_PID'], os.getppid())")
    child.start()
    assert child.process is not None and child.process.wait(30) == 0
    assert child.output.read_text().split() == [str(os.getpid())] * 2


async def test_a_child_that_keeps_dying_is_given_up_with_its_last_error(tmp_path: Path) -> None:
    child = make(tmp_path, "print('the disk is on fire'); raise SystemExit(3)")
    child.start()
    reason = await asyncio.wait_for(child.keep_running(asyncio.Event()), 60)
    assert "child died 6 times in a row; its last error: the disk is on fire" in reason
    assert child.restarts == children.MAX_RESTARTS


async def test_a_child_that_would_end_the_same_way_again_is_started_once(tmp_path: Path) -> None:
    child = make(tmp_path, f"print('model_path: is no folder'); raise SystemExit({EXIT_FOR_GOOD})", once=True)
    child.start()
    reason = await asyncio.wait_for(child.keep_running(asyncio.Event()), 30)
    assert reason == "child cannot continue: model_path: is no folder"
    assert (child.restarts, child.finished) == (0, False)


async def test_a_child_that_ends_twice_by_the_same_unexpected_error_is_given_up(tmp_path: Path) -> None:
    same = make(tmp_path, f"print('ValueError: betas'); raise SystemExit({EXIT_UNEXPECTED})")
    same.start()
    reason = await asyncio.wait_for(same.keep_running(asyncio.Event()), 30)
    assert reason == "child ended twice in a row by the same error: ValueError: betas"
    assert same.restarts == 1
    letters = "''.join(chr(103 + int(n)) for n in str(os.getpid()))"
    other = make(tmp_path, f"import os; print({letters}); raise SystemExit({EXIT_UNEXPECTED})")
    other.start()
    assert "died 6 times in a row" in await asyncio.wait_for(other.keep_running(asyncio.Event()), 60)


async def test_the_reason_is_of_this_start(tmp_path: Path) -> None:
    (tmp_path / "child.log").write_text('{"level": "error", "reason": "of last week"}\n')
    (tmp_path / "child.out").write_text("of last week\n")
    child = make(tmp_path, "print('of today')")
    child.start()
    assert child.process is not None
    await asyncio.to_thread(child.process.wait, 20)
    assert child.last_error() == "of today"


@pytest.mark.parametrize(
    ("then", "how"),
    [("", ""), ("os.abort()", "killed by SIGABRT"), ("raise SystemExit(3)", "exit code 3")],
    ids=["well", "aborted", "failed"],
)
async def test_a_child_that_has_said_that_it_is_finished_is_not_started_again(
    then: str, how: str, tmp_path: Path
) -> None:
    child = make(tmp_path, finishing(tmp_path, then), once=True)
    with structlog.testing.capture_logs() as logged:
        child.start()
        assert await asyncio.wait_for(child.keep_running(asyncio.Event()), 30) == "finished"
    assert (child.finished, child.restarts) == (True, 0)
    assert [entry["how"] for entry in logged if entry["log_level"] == "error"] == ([how] if how else [])


async def test_a_child_that_ends_well_without_saying_so_is_started_again(tmp_path: Path) -> None:
    """As a trainer that got a SIGTERM from elsewhere. What its predecessor said does not count for it."""
    child = make(tmp_path, "pass", once=True)
    child.announce_file.write_text(json.dumps({"pid": 1, "finished": True}))
    child.start()
    await asyncio.wait_for(child.keep_running(asyncio.Event()), 60)
    assert (child.finished, child.restarts) == (False, children.MAX_RESTARTS)


async def test_the_reason_in_the_log_wins_over_what_was_printed(tmp_path: Path) -> None:
    log = '{"level": "error", "event": "service.failed", "reason": "no room"}'
    text = f"{log}\n5\n"  # the last line is JSON, and no object
    child = make(tmp_path, f"open({str(tmp_path / 'child.log')!r}, 'a').write({text!r}); print('noise')")
    child.start()
    assert child.process is not None
    await asyncio.to_thread(child.process.wait, 20)
    assert child.last_error() == "no room"


async def test_stopping_ends_grandchildren_and_those_who_will_not_listen(tmp_path: Path) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {deaf!r}]).wait()"
    child = make(tmp_path, code)
    child.start()
    deadline = time.monotonic() + 20
    while not (child.output.exists() and "up" in child.output.read_text()) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    below = psutil.Process(child.pid).children(recursive=True)
    assert below
    begin = time.monotonic()
    await stop_all([child], 0.5)
    assert time.monotonic() - begin < 5
    _, alive = await asyncio.to_thread(psutil.wait_procs, below, 5)
    assert not alive


async def test_no_start_is_spent_on_a_death_that_something_outside_explains(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []

    async def hold(name: str, reason: str) -> bool:
        told.append((name, reason))
        return len(told) <= 2 * children.MAX_RESTARTS

    child = make(tmp_path, "print('No space left on device'); raise SystemExit(3)", hold=hold)
    child.start()
    reason = await asyncio.wait_for(child.keep_running(asyncio.Event()), 60)
    assert reason == f"child died {children.MAX_RESTARTS + 1} times in a row; its last error: No space left on device"
    assert told == [("child", "No space left on device")] * (3 * children.MAX_RESTARTS + 1)


async def test_an_old_line_of_a_full_disk_is_not_why_a_process_was_killed(tmp_path: Path) -> None:
    told: list[str] = []

    async def hold(name: str, reason: str) -> bool:
        told.append(reason)
        return False

    line = json.dumps({"level": "error", "reason": "No space left on device"})
    code = f"import os; open({str(tmp_path / 'child.log')!r}, 'a').write({line!r} + chr(10)); os.kill(os.getpid(), 9)"
    child = make(tmp_path, code, hold=hold)
    child.start()
    await asyncio.wait_for(child.keep_running(asyncio.Event()), 60)
    assert set(told) == {"killed by SIGKILL"}


async def test_the_same_error_with_other_numbers_and_paths_is_the_same(tmp_path: Path) -> None:
    child = make(
        tmp_path,
        "import os, time; p = os.getpid()\n"
        "print(f'row {p} of /tmp/job-{p}/x.bin at {hex(id(p) + p)}, 127.0.0.1:{p}: lost 0f{p}ab after {p}.5 s')\n"
        f"raise SystemExit({EXIT_UNEXPECTED})",
    )
    child.start()
    reason = await asyncio.wait_for(child.keep_running(asyncio.Event()), 30)
    assert reason.startswith("child ended twice in a row by the same error: row ")
    assert child.restarts == 1


async def test_each_death_is_said_with_its_reason_and_what_comes_next(tmp_path: Path) -> None:
    said: list[str] = []
    child = make(tmp_path, "print('no room'); raise SystemExit(3)")
    child.say, child.continues = said.append, lambda: "it continues at step 41 of 60"
    child.start()
    await asyncio.wait_for(child.keep_running(asyncio.Event()), 60)
    assert said[0] == "child died: no room; restart 1 of 5 in 0.01 s; it continues at step 41 of 60"
    assert [line.partition("restart ")[2][:6] for line in said] == [f"{n} of 5" for n in range(1, 6)]


async def test_a_child_that_asks_to_be_started_again_has_not_died(tmp_path: Path) -> None:
    """Machines of the trainer may come and go more often than a process may die."""
    said: list[str] = []
    count = tmp_path / "count"
    code = (
        f"from pathlib import Path; f = Path({str(count)!r}); n = int(f.read_text() if f.exists() else 0) + 1\n"
        f"f.write_text(str(n)); print('node b is lost'); raise SystemExit({EXIT_AGAIN} if n < 9 else {EXIT_FOR_GOOD})"
    )
    child = make(tmp_path, code)
    child.say = said.append
    child.start()
    assert "cannot continue" in await asyncio.wait_for(child.keep_running(asyncio.Event()), 60)
    assert said == ["child: node b is lost"] * 8


async def test_a_child_that_a_signal_has_stopped_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_LOOK_SECONDS", 0.1)
    child = make(tmp_path, "import time; time.sleep(60)", stopped_seconds=1.0)
    child.start()
    changed, first = asyncio.Event(), child.pid
    keeping = asyncio.create_task(child.keep_running(changed))
    await asyncio.sleep(1.5)
    assert child.pid == first, "it sleeps, and nothing has stopped it"
    os.kill(first, signal.SIGSTOP)
    await asyncio.wait_for(changed.wait(), 30)
    assert child.pid != first
    keeping.cancel()
    await stop_all([child], 2)


async def test_a_killed_process_is_not_blamed_for_what_it_printed_last(tmp_path: Path) -> None:
    child = make(tmp_path, "import os, signal; print('all is well', flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    child.start()
    said: list[str] = []
    child.say = said.append
    await asyncio.wait_for(child.keep_running(asyncio.Event()), 60)
    assert said[0].startswith("child died: killed by SIGKILL; restart 1 of 5")


def entry(event: str, **fields: object) -> str:
    return json.dumps({"event": event, **fields})


async def test_a_death_before_serving_is_quick_however_long_it_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_HEALTHY_SECONDS", 0.05)
    slow = make(tmp_path, "import time; time.sleep(0.1); raise SystemExit(3)", logs_ready=True)
    slow.start()
    assert "died 6 times in a row" in await asyncio.wait_for(slow.keep_running(asyncio.Event()), 60)
    ready = entry("service.ready")
    code = f"import time; open({str(slow.log_file)!r}, 'a').write({ready!r} + chr(10)); time.sleep(0.3)"
    serving = make(tmp_path, code, logs_ready=True)
    monkeypatch.setattr(children, "_FOLLOW_SECONDS", 0.01)
    serving.start()
    keeper = asyncio.create_task(serving.keep_running(asyncio.Event()))
    while serving.restarts < 7:
        await asyncio.sleep(0.05)
        assert not keeper.done()
    keeper.cancel()
    serving.end_group(9)


async def test_a_process_that_only_prints_says_when_it_serves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-server prints when it serves. Its lines before its death do not count."""
    monkeypatch.setattr(children, "_FOLLOW_SECONDS", 0.01)
    said: list[str] = []
    flag = tmp_path / "may serve"
    code = (
        "import pathlib, time; f = pathlib.Path({!r})\n"
        "while not f.exists(): time.sleep(0.01)\n"
        "print('Server is ready', flush=True); time.sleep(60)"
    )
    child = make(tmp_path, code.format(str(flag)), prints_ready="Server is ready")
    child.say = said.append
    flag.touch()
    child.start()
    keeper = asyncio.create_task(child.keep_running(asyncio.Event()))
    async with asyncio.timeout(30):
        while child.start_seconds:
            await asyncio.sleep(0.01)
        assert said == []
        flag.unlink()
        child.end_group(signal.SIGKILL)
        while not child.restarts or not child.is_running():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert [line.partition(";")[0] for line in said] == ["child died: killed by SIGKILL"]
        flag.touch()
        while len(said) < 2:
            await asyncio.sleep(0.01)
    assert re.fullmatch(r"child serves again, \d+ s after its start", said[1])
    keeper.cancel()
    child.end_group(signal.SIGKILL)


async def test_phases_and_waits_of_its_log_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    child = make(tmp_path, "import time; time.sleep(60)", logs_ready=True)
    child.say = said.append
    child.log_file.write_text(entry(waits.PHASE, phase="of the process before") + "\n")
    child.start()
    child._follow()
    assert child.phase == "starts" and child.start_seconds > 0
    with child.log_file.open("a") as log:
        log.write(entry(waits.PHASE, phase="loads vLLM") + "\n")
        log.write(entry(waits.WAITS, whom="NATS at n:1", reason="no answer", limit_seconds=30.0) + "\n" + '{"ev')
    child._follow()
    assert (child.phase, child.waits) == ("loads vLLM", "waits for NATS at n:1 (no answer); gives up after 30 s")
    assert said == ["child waits for NATS at n:1 (no answer); gives up after 30 s"]
    with child.log_file.open("a") as log:
        log.write('ent": 1}\n' + entry(waits.WENT_ON) + "\n" + entry("service.ready") + "\n")
    child._follow()
    assert (child.waits, child.start_seconds) == ("", 0)
    child.end_group(9)


async def test_what_a_process_prints_stays_within_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_LOOK_SECONDS", 0.05)
    script = "import time\nfor i in range(40): print('x' * 20_000, i, flush=True); time.sleep(0.02)"
    command = [sys.executable, "-c", script]
    child = Child("other", "other", command, {}, "", tmp_path / "other.log", once=True, log_mib=1)
    child.start()
    child.announce_file.write_text(json.dumps({"pid": child.pid, "finished": True}))
    async with asyncio.timeout(30):
        assert await child.keep_running(asyncio.Event()) == "finished"
    printed = [child.output, child.output.with_name("other.out.1")]
    assert all(file.stat().st_size < 250_000 for file in printed)
    text = "".join(file.read_text() for file in reversed(printed))
    assert int(text.split()[-1]) > 30


LOADS_FIRST = """
import os, sys, time
from trinity.runtime import spares
spares.wait(lambda: print("loaded", os.getpid(), flush=True))
print("runs", os.getpid(), flush=True)
time.sleep(60)
"""


async def test_a_spare_that_has_loaded_meanwhile_takes_the_place_of_a_child_that_died(tmp_path: Path) -> None:
    def said(word: str) -> list[int]:
        lines = child.output.read_text().splitlines()
        return [int(line.split()[1]) for line in lines if line.startswith(word)]

    child = make(tmp_path, LOADS_FIRST, prints_ready="runs", keeps_spare=True)
    child.start()
    keeper = asyncio.create_task(child.keep_running(asyncio.Event()))
    try:
        async with asyncio.timeout(30):
            for round in range(2):
                while len(said("loaded")) < round + 1:
                    await asyncio.sleep(0.01)
                child.end_group(signal.SIGKILL)
                while len(said("runs")) < round + 2:
                    await asyncio.sleep(0.01)
                assert child.pid == said("runs")[-1] == said("loaded")[round], "it did not begin anew"
            while len(said("loaded")) < 3:
                await asyncio.sleep(0.01)
    finally:
        keeper.cancel()
        await stop_all([child], 5)
    assert not psutil.pid_exists(said("loaded")[-1])
