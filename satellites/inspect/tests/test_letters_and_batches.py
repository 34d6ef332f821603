"""`trinity deadletters` and `batch show`: what they say, and what they refuse before anything starts."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.fakes.data.experience import make_group, make_task
from support.fakes.stopped_job import stopped_job
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.common.v1 import experience_pb2
from trinity.data.wire import encode_outcome, task_to_proto
from trinity.inspect import batch
from trinity.inspect import dead_letters as letters
from trinity.reading import reader, wire
from trinity.reading.errors import RunError
from trinity.reading.job import ProcessRecord, SupervisorRecord
from trinity.reading.reader import JobStage, find_job_stage
from trinity.runtime.process import FileLock, free_port

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-xdist tells its workers the width of its terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)


def make_letter(**changes: Any) -> experience_pb2.AttemptFailure:
    task = task_to_proto(make_task(7, row_json='{"question": "1+1", "answer": "#### 2"}'))
    values = {"attempt": 3, "cause": "scorer_error", "error": "RuntimeError: no\nline 2", "failed_at_seconds": 1.7e9}
    return experience_pb2.AttemptFailure(task=task, explorer_id="one", final=True, **{**values, **changes})


def test_a_letter_is_one_line_in_the_list_and_nothing_in_it_reaches_the_terminal() -> None:
    text = letters.render("p/n", [wire.letter(make_letter(error="\x1b[31mred [bold]\nline 2"))], 100)
    title, _, line = text.splitlines()
    assert title.strip() == "p/n: 1 dead letters"
    assert line.split()[:3] == ["7", "3", "sums/0/7"]
    assert line.rstrip().endswith(r"\x1b[31mred [bold]")
    assert "--limit 2" in letters.render("p/n", [wire.letter(make_letter())], 1)


def test_a_letter_is_shown_with_everything_that_is_known_of_its_task() -> None:
    found = wire.whole_letter(make_letter())
    assert found["task"]["row"] == {"question": "1+1", "answer": "#### 2"}
    assert (found["task"]["row_number"], found["task"]["max_attempts"], found["error"]) == (
        7,
        3,
        "RuntimeError: no\nline 2",
    )
    text = letters.describe(found)
    assert "3 of 3, requeued 0 times" in text
    assert "line 2" in text
    assert '"question": "1+1"' in text
    unknown = experience_pb2.AttemptFailure(cause="invalid_experience", error="")
    unknown.task.ordinal = 3
    assert "(unknown)" in letters.describe(wire.whole_letter(unknown))


@pytest.mark.parametrize(("ordinals", "everything"), [([], False), ([3], True)])
def test_which_letters_must_be_said_once(ordinals: list[int], everything: bool) -> None:
    with pytest.raises(RunError, match="trinity deadletters drop 3 7") as caught:
        letters.Change("drop", ordinals, everything).check()
    assert caught.value.code == 2


def make_entry() -> pb.LedgerEntry:
    entry = pb.LedgerEntry(
        run="r",
        step=5,
        policy="replay",
        reward_mean=0.5,
        operators=["len_penalty"],
        partial=True,
        created_at_seconds=1e9,
    )
    entry.groups.add(
        log_sequence=9, task_id="sums/0/7", ordinal=7, num_experiences=4, oldest_version=2, newest_version=4,
        staleness_steps=2, use_count=3, num_response_tokens=48, reward_mean=0.5,
        experiences=[pb.LedgerExperience(index=1, reward=0.25), pb.LedgerExperience(index=3, reward=0.75, masked=True)],
    )  # fmt: skip
    entry.dropped.add(ordinal=6, log_sequence=8, reason="stale", num_response_tokens=11)
    entry.cut.add(ordinal=5, task_id="sums/0/5\x1b")
    entry.auxiliary.add(buffer="experts", row=12)
    entry.cursor.log_sequence = 9
    return entry


def test_a_batch_is_what_the_ledger_says_and_no_more() -> None:
    found = wire.batch(make_entry())
    (group,) = found["groups"]
    assert (group["stored"], group["kept"], group["masked"], group["versions"], group["use_count"]) == (
        4,
        2,
        1,
        [2, 4],
        3,
    )
    assert "cursor" not in found
    text = batch.render("p/n", found)
    assert "step 5: 1 groups, 2 experiences, mean reward 0.500; replay" in text
    assert "partial: max_read_timeout was over" in text
    assert "2 of 4, 1 masked" in text
    assert "2-4" in text
    assert "operators: len_penalty" in text
    assert "6 (stale, 11 tokens)" in text
    assert r"cut, as the step did not wait for them, by ordinal: 5 (sums/0/5\x1b)" in text
    assert "1 rows of 'experts' in addition: 12" in text


def test_texts_are_those_that_were_trained_with_the_reward_they_were_trained_with() -> None:
    group = make_group(make_task(7))
    texts = tuple(replace(e, prompt_text="2+2", response_text=f"r{e.rollout}\x1b") for e in group.experiences)
    member = make_entry().groups[0]
    found = wire.experiences(member, encode_outcome(replace(group, experiences=texts)))
    assert [(e["index"], e["reward"], e["masked"]) for e in found] == [(1, 0.25, False), (3, 0.75, True)]
    shown = wire.batch(make_entry())
    shown["groups"][0]["experiences"] = found
    assert r"r3\x1b" in batch.render("p/n", shown)
    moves = [{"turn": 4, "from": "a-1"}]
    moved = tuple(replace(e, info_json=json.dumps({"moved": moves})) for e in texts[:2]) + texts[2:]
    found = wire.experiences(member, encode_outcome(replace(group, experiences=moved)))
    assert [e.get("moved") for e in found] == [moves, None]
    del member.experiences[:]
    assert [e["index"] for e in wire.experiences(member, encode_outcome(group))] == [0, 1, 2, 3]


@pytest.fixture
def stopped(tmp_path: Path) -> Callable[..., Path]:
    return partial(stopped_job, tmp_path / "jobs")


def job_stage_of(job: Path, stage: str = "") -> JobStage:
    return find_job_stage(None, job, stage)


def test_the_stage_is_the_one_asked_for_or_the_last_that_was_trained(stopped: Callable[..., Path]) -> None:
    job = stopped("one", "two", "three", steps=2)
    for age, stage in enumerate(("three", "two", "one")):
        os.utime(job / stage / "config.json", (1e9 - age, 1e9 - age))
    (job / "three/monitor/batches.jsonl").unlink()
    assert job_stage_of(job).stage == "two"
    chosen = job_stage_of(job, "three")
    assert (chosen.stage, chosen.folder, chosen.whole_job().folder) == ("three", job / "three", job)
    assert chosen.whole_job().token != chosen.run
    with pytest.raises(RunError, match="'one'"):
        job_stage_of(job, "four")


async def _open(job_stage: JobStage) -> None:
    async with reader.any_buffer(job_stage):
        raise AssertionError("nothing can be opened")


def test_a_job_in_use_and_one_without_a_store_are_left_alone(
    stopped: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRINITY_NATS_URL", raising=False)
    monkeypatch.setattr(reader, "_LOCK_SECONDS", 0.2)
    job_stage = job_stage_of(stopped(steps=1))
    with pytest.raises(RunError, match="set TRINITY_NATS_URL"):
        asyncio.run(_open(job_stage))
    lock = FileLock(job_stage.job / ".lock")
    assert lock.acquire()
    with pytest.raises(RunError, match=f"another command \\(process {os.getpid()}\\)"):
        asyncio.run(_open(job_stage))
    lock.release()


@pytest.mark.timeout(30)
def test_a_run_that_ends_while_its_buffer_is_asked_is_then_read_from_its_store(
    stopped: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRINITY_NATS_URL", raising=False)
    job_stage = job_stage_of(stopped(steps=1))
    record = job_stage.job / "run" / "main.json"
    record.parent.mkdir()
    process = ProcessRecord("buffer", "buffer", os.getpid(), f"127.0.0.1:{free_port()}")
    live = SupervisorRecord(os.getpid(), "both", job_stage.run, "", "nats://127.0.0.1:1", [process])
    record.write_text(json.dumps(asdict(live)))
    ending = threading.Timer(1.0, record.unlink)
    ending.start()
    with pytest.raises(RunError, match="has no NATS store"):  # the read-only buffer looks for it
        asyncio.run(_open(job_stage))
    ending.join()


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (["deadletters", "retry", "--job", "{job}"], 2, "or all of them by --all"),
        (["deadletters", "retry", "3", "--job", "{job}"], 1, "`trinity run` with the same YAML, then retry again"),
        (["deadletters", "list", "--job", "/no/such"], 1, "no run has begun in /no/such"),
        (["batch", "show", "2", "--stage", "x", "--job", "{job}"], 2, "no stages"),
        (["replay", "--from-step", "1", "--job", "{job}"], 1, "has trained no step yet"),
    ],
)
def test_a_wrong_command_is_one_sentence(
    stopped: Callable[..., Path], command: list[str], code: int, said: str
) -> None:
    job = str(stopped())
    environment = {key: value for key, value in os.environ.items() if key != "TRINITY_NATS_URL"}
    done = subprocess.run(
        [sys.executable, "-m", "trinity.cli.main", *(part.format(job=job) for part in command)],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_step_that_a_checkpoint_holds_is_not_skipped(
    stopped: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_stage = job_stage_of(stopped())
    monkeypatch.setattr(batch, "complete_steps", lambda folder: [4])

    async def skip(step: int, reason: str) -> wire.Facts:
        entry = make_entry()
        entry.skip_reason = reason
        return wire.batch(entry)

    reader = SimpleNamespace(buffer=SimpleNamespace(skip=skip))
    monkeypatch.setattr(batch, "ask", lambda service, stage, question: asyncio.run(question(reader)))
    with pytest.raises(RunError, match="a checkpoint of step 4 holds it; `trinity weights rollback` goes"):
        batch.skip_batch(job_stage, 4, "late")
    assert "step 5 is skipped (a bad \\x1b group); its 1 groups are not trained" in batch.skip_batch(
        job_stage, 5, "a bad \x1b group"
    )
    entry = make_entry()
    entry.skip_reason = "why"
    assert "; skipped: why" in batch.render("p/n", wire.batch(entry))
