"""A run killed at step 7 continues from checkpoint 5 and trains steps 6 and 7 on the same groups as before (I3).

Twice in one run: first the trainer is killed, then, at step 12, `trinity run` and with it everything but the broker.
The explorer is a stand-in that answers at once, with other tokens for each task; all else is real, forked with
everything imported (support/programs/forked_run.py).
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.fakes import peers
from support.programs.forked_run import ForkedRun
from support.programs.run import Status, kill_process, process_of, write_config
from support.servers.nats import NatsServer
from trinity.api.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from trinity.runtime import names
from trinity.weights.checkpoints import complete_steps

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

RUN = names.run_id("quickstart", "identity")
STEPS, SAVE_INTERVAL, GROUPS = 14, 5, 4

Groups = list[tuple[int, str]]  # sequence in the log and task id


@dataclass
class Killed:
    """What was said of the steps after the newest checkpoint, before and after."""

    checkpoint: int
    noted: list[tuple[int, list[int]]]  # by the trainer, in its own order
    ledger_before: dict[int, Groups] = field(default_factory=dict)
    ledger_after: dict[int, Groups] = field(default_factory=dict)
    noted_after: list[tuple[int, list[int]]] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        """Trained, not saved, and trained again."""
        return [step for step, _ in self.noted if step > self.checkpoint]


@dataclass
class Story:
    trainer: Killed
    everything: Killed
    resumed: list[int]
    code: int
    run: ForkedRun


@pytest.fixture(scope="module")
def story(
    repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("identity")
    changes = {
        "name": "identity",
        "mode": "train",
        "buffer": {"batch_size": GROUPS, "total_steps": STEPS, "explorer_input": {"eval_tasksets": []}},
        "algorithm": {"repeat_times": 4},
        "trainer": {"save_interval": SAVE_INTERVAL},
        "stages": [],
        "synchronizer": {"canary": False},  # the explorer here has no engine to compute it with
    }
    config = write_config(repository / "examples/quickstart/arithmetic.yaml", folder / "identity.yaml", changes)
    environment = {"TRINITY_MODEL_PATH": str(quickstart_model), "TRINITY_TASKSET_PATH": str(quickstart_data)}
    server = NatsServer(folder / "nats")
    server.start()
    run = ForkedRun(config, folder, TRINITY_NATS_URL=server.url, **environment)
    try:
        yield asyncio.run(_with_explorer(server.url, lambda: _tell(run)))
    finally:
        run.end()
        server.stop()


async def _with_explorer(url: str, tell: Callable[[], Story]) -> Story:
    async with peers.explorer(url, RUN):
        return await asyncio.to_thread(tell)


def _tell(run: ForkedRun) -> Story:
    run.start()
    status = run.until(lambda s: s["step"], 120, "the first step")
    _until_noted(run, 7, saved=5)
    kill_process(status, "trainer")
    trainer = Killed(5, _noted(run))
    trainer.ledger_before = _ledger(run, status, trainer.steps)
    _until_noted(run, 11)  # 7 again, and checkpoint 10
    trainer.ledger_after = _ledger(run, status, trainer.steps)
    trainer.noted_after = _noted(run)[len(trainer.noted) :]

    _until_noted(run, 12, saved=10)
    everything_before = _ledger(run, status, [11, 12])
    run.kill()
    everything = Killed(10, _noted(run)[len(trainer.noted) :], everything_before)
    seen = len(_noted(run))
    assert not run.left_alive(10)

    run.start()
    status = run.until(lambda s: process_of(s, "buffer")["health"] == "SERVING", 120, "the buffer")
    everything.ledger_after = _ledger(run, status, everything.steps)
    code = run.finish(120)
    everything.noted_after = _noted(run)[seen:]
    return Story(trainer, everything, _resumed(run), code, run)


def _noted(run: ForkedRun) -> list[tuple[int, list[int]]]:
    path = run.job / "monitor/batches.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(entry["step"], entry["groups"]) for entry in map(json.loads, lines)]


def _until_noted(run: ForkedRun, step: int, saved: int = 0) -> None:
    """Until the trainer's newest note is of this step: polled so often that it is not far beyond.

    saved: and until the checkpoint of that step is complete, which a thread writes during later steps.
    """
    deadline = time.monotonic() + 120
    while not (noted := _noted(run)) or noted[-1][0] < step or (saved and saved not in complete_steps(run.job)):
        assert time.monotonic() < deadline, (noted, run.tail())
        time.sleep(0.005)


def _ledger(run: ForkedRun, status: Status, steps: list[int]) -> dict[int, Groups]:
    """From the buffer."""
    with run.channel(process_of(status, "buffer")["address"]) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        answers = [
            stub.GetLedgerEntry(buffer_pb2.GetLedgerEntryRequest(run=RUN, step=step), timeout=20) for step in steps
        ]
    return {a.entry.step: [(group.log_sequence, group.task_id) for group in a.entry.groups] for a in answers}


def _resumed(run: ForkedRun) -> list[int]:
    events = map(json.loads, (run.job / "log/trainer.log").read_text().splitlines())
    return [event["step"] for event in events if event["event"] == "trainer.resumed"]


def _check(killed: Killed, at_least: list[int]) -> None:
    assert set(killed.steps) >= set(at_least)
    after = dict(killed.noted_after)
    for step, groups in killed.noted:
        if step > killed.checkpoint:
            assert after[step] == groups, f"step {step}: the trainer's own record"
            assert [sequence for sequence, _ in killed.ledger_after[step]] == groups, f"step {step}: the ledger"
    for step, groups_before in killed.ledger_before.items():
        assert killed.ledger_after[step] == groups_before, f"step {step}: the ledger, before and after"
    assert set(killed.ledger_before) >= set(at_least)
    assert [step for step, _ in killed.noted_after][: len(killed.steps)] == killed.steps


def test_the_trainer_killed_at_step_7_trains_6_and_7_again_on_the_same_groups(story: Story) -> None:
    _check(story.trainer, at_least=[6, 7])


def test_a_run_killed_at_step_12_trains_11_and_12_again_on_the_same_groups(story: Story) -> None:
    _check(story.everything, at_least=[11, 12])


def test_it_went_on_from_the_checkpoints_and_came_to_its_end(story: Story) -> None:
    assert story.code == 0, story.run.tail()
    assert story.resumed == [5, 10]


def test_no_two_steps_had_a_group_in_common(story: Story) -> None:
    batches = dict([*story.trainer.noted, *story.trainer.noted_after, *story.everything.noted_after])
    assert sorted(batches) == list(range(1, STEPS + 1))
    used = [sequence for groups in batches.values() for sequence in groups]
    assert len(used) == len(set(used)) == STEPS * GROUPS
