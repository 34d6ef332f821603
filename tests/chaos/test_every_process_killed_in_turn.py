"""One GRPO run on real parts; every process of it is killed with -9 at a random moment, `trinity run` itself included.

I1 to I4: nothing acknowledged is lost, no group is trained twice, step k stays the same batch, the counts add up. Who
judges it: support/checks/audit.py. Twenty kills of each, and of pairs: run_chaos.py.
"""

import json
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chaos.killed_run import GROUPS, SAVE_INTERVAL, ChaosRun, Moment, is_up, moment
from support.checks.audit import Findings
from support.programs.run import process_of
from trinity.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 30
QUICK_TO_START = {"buffer": "step", "nats": "checkpoint", "sync": "waiting", "environment": "step"}  # and when they die
assert (STEPS - 2) % SAVE_INTERVAL == 1, "the last kill is to cost a step, also if the pause comes a step late"

Said = dict[int, set[tuple[int, ...]]]


@dataclass
class Story:
    before: Said
    code_of_sigterm: int
    seconds_of_sigterm: float
    left_by_sigterm: list[str]
    said: str
    left_by_kill: list[str]
    code: int
    lines: list[int]
    summary: dict[str, Any]
    findings: Findings
    run: ChaosRun


@pytest.fixture(scope="module")
def story(
    repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Story]:
    run = ChaosRun(repository, tmp_path_factory.mktemp("chaos"), quickstart_model, quickstart_data, STEPS)
    try:
        yield _tell(run)
    finally:
        run.end()


def _tell(run: ChaosRun) -> Story:
    rng = random.Random(11)
    run.start()
    for victim, phase in QUICK_TO_START.items():
        assert run.strike([victim], moment(rng, [victim], phase))
    assert run.strike(["explorer"], moment(rng, ["explorer"], "step"))
    assert run.strike(["trainer"], Moment("start", rng.uniform(0.0, 2.0)))  # both take long to come back
    assert run.resumes([*QUICK_TO_START, "explorer", "trainer"])
    newest = max(run.record.said)
    run.until(lambda s: is_up(s, "explorer") and (s["step"] or 0) > newest, 240, "explorer and trainer go on")
    before = {step: set(groups) for step, groups in run.record.said.items()}

    run.signal(signal.SIGTERM)
    begin = time.monotonic()
    code_of_sigterm = run.finish(30)
    seconds_of_sigterm = time.monotonic() - begin
    left_by_sigterm = run.left_alive(1)
    said = run.tail(1)

    run.start()
    run.until(lambda s: (s["step"] or 0) > max(before), 240, "it continues after SIGTERM")
    _pause_when_the_rest_is_in_the_ledger(run)
    run.kill()
    left_by_kill = run.left_alive(10)
    run.start()
    code = run.finish(300)
    return Story(
        before=before,
        code_of_sigterm=code_of_sigterm,
        seconds_of_sigterm=seconds_of_sigterm,
        left_by_sigterm=left_by_sigterm,
        said=said,
        left_by_kill=left_by_kill,
        code=code,
        lines=run.record.lines,
        summary=json.loads((run.job / "summary.json").read_text()),
        findings=run.audited(),
        run=run,
    )


def _pause_when_the_rest_is_in_the_ledger(run: ChaosRun) -> None:
    """Everything is explored two steps before the end. What starts afterwards need not wait for an engine."""
    run.wait_until_noted(STEPS - 2)
    status = run.until(lambda s: is_up(s, "trainer"), 60, "the trainer is there")
    with run.channel(process_of(status, "trainer")["address"]) as channel:
        trainer_pb2_grpc.TrainerServiceStub(channel).Pause(trainer_pb2.PauseRequest(), timeout=60)
    run.until(lambda s: s["groups"] and s["groups"]["stored"] == STEPS * GROUPS, 120, "all groups are stored")


def test_the_run_ends_well(story: Story) -> None:
    assert story.code == 0, story.run.tail()


def test_the_auditor_finds_nothing(story: Story) -> None:
    assert story.findings.differences == []
    assert story.findings.stored == STEPS * GROUPS
    assert story.findings.acknowledged > 0.9 * STEPS * GROUPS  # an explorer may die before it has written that down


def test_the_counts_add_up(story: Story) -> None:
    summary = story.summary
    assert summary["groups_fed"] == summary["groups_stored"] + summary["dead_letters"] + summary["outstanding"]
    assert summary["groups_stored"] == STEPS * GROUPS


def test_every_group_is_trained_once_and_no_step_changed(story: Story) -> None:
    after = story.run.record.said
    assert set(after) == set(range(1, STEPS + 1))
    assert all(len(batches) == 1 for batches in after.values()), after
    used = [sequence for batches in after.values() for groups in batches for sequence in groups]
    assert len(used) == len(set(used)) == STEPS * GROUPS
    for step, batches in story.before.items():
        assert after[step] == batches, f"step {step}"


def test_steps_were_trained_again(story: Story) -> None:
    """Else the kills of the trainer have shown nothing."""
    assert len(story.lines) > STEPS


def test_sigterm_ends_everything_within_ten_seconds(story: Story) -> None:
    assert story.code_of_sigterm == 128 + signal.SIGTERM
    assert story.seconds_of_sigterm < 10
    assert story.left_by_sigterm == []
    assert "SIGTERM" in story.said


def test_nothing_outlives_a_killed_supervisor(story: Story) -> None:
    assert not story.left_by_kill, "\n".join(story.left_by_kill)
