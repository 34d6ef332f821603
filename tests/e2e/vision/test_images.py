"""A tiny vision-language model learns to count squares on real vLLM and DeepSpeed, while each process is killed.

The tests look at what the run left: counts, log-probabilities, a replay, pictures, and the log on the broker.
"""

import asyncio
import hashlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from support.checks.audit import messages
from support.fakes.data.vision import EXAMPLE, KINDS, make_model
from support.programs.run import Status, TrinityRun, kill_process, process_of, write_config
from support.servers.nats import NatsServer
from trinity.data.experience import Group
from trinity.data.images import digest
from trinity.data.wire import decode_outcome
from trinity.runtime.broker import connect
from trinity.runtime.names import RunNames, run_id

pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        importlib.util.find_spec("torchvision") is None, reason="vLLM's Qwen2.5-VL needs torchvision: '.[vision]'"
    ),
]

STEPS, SAVE_INTERVAL = 80, 10
KILLED = {5: "environment", 12: "sync", 18: "buffer", 24: "nats", 30: "explorer", 43: "trainer"}


@dataclass
class Journey:
    code: int
    run: TrinityRun
    summary: dict[str, Any]

    def trinity(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "trinity.cli.main", *arguments, "--config", str(self.run.config)]
        return subprocess.run(command, env=self.run.environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def journey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Journey]:
    folder = tmp_path_factory.mktemp("images")
    make_data = [sys.executable, str(EXAMPLE / "make_data.py"), str(folder / "data")]
    subprocess.run(make_data, check=True, timeout=60, capture_output=True)
    changes = {
        "algorithm": {"optimizer": {"lr_warmup_steps": 10}},
        "buffer": {"total_steps": STEPS},
        "trainer": {"save_interval": SAVE_INTERVAL},
    }
    config = write_config(EXAMPLE / "squares.yaml", folder / "squares.yaml", changes)
    model = make_model(folder / "model", KINDS[0], "--guesses")
    paths = {"TRINITY_MODEL_PATH": str(model), "TRINITY_TASKSET_PATH": str(folder / "data")}
    run = TrinityRun(config, folder, **paths, TRINITY_BUFFER_LOG_KEEP_GIB="0")
    try:
        run.start()
        for step, name in KILLED.items():
            seen = run.until(lambda s, step=step: (s["step"] or 0) >= step, 400, f"step {step}")
            kill_process(seen, name)
            run.until(lambda s, name=name: _is_back(s, name), 120, f"{name} is back")
        code = run.finish(600)
        yield Journey(code, run, json.loads((run.job / "summary.json").read_text()) if code == 0 else {})
    finally:
        run.end()


def _is_back(status: Status, name: str) -> bool:
    return process_of(status, name)["restarts"] >= 1


def _trained(journey: Journey) -> list[dict[str, Any]]:
    """What the trainer logged of each step, the last time that it was trained."""
    lines = [json.loads(line) for line in (journey.run.job / "log/trainer.log").read_text().splitlines()]
    return list({line["step"]: line for line in lines if line["event"] == "trainer.step.done"}.values())


def test_the_reward_rises_and_the_counts_add_up(journey: Journey) -> None:
    assert journey.code == 0, journey.run.tail()
    summary = journey.summary
    assert summary["eval_before"] == pytest.approx(1 / 3, abs=0.15), (
        "the model begins with guesses, of which a third is right"
    )
    assert min(summary["reward_last"], summary["eval_after"]) > 0.5  # no guess has more than a third
    assert summary["groups_fed"] == summary["groups_stored"] == 32 * STEPS
    assert summary["dead_letters"] == summary["outstanding"] == 0
    assert [line["step"] for line in _trained(journey)] == list(range(1, STEPS + 1))


def test_trainer_and_engine_agree_on_every_token_of_the_same_weights(journey: Journey) -> None:
    """Of responses that the trainer's weights sampled, prompts included; others differ by what was learnt meanwhile."""
    kernels = [line["actor/mismatch/kernel_logprob_diff"] for line in _trained(journey)
               if "actor/mismatch/kernel_logprob_diff" in line]  # fmt: skip
    assert kernels
    assert max(kernels) < 1e-4, kernels


def test_a_replay_is_equal_bit_for_bit(journey: Journey) -> None:
    done = journey.trinity("replay", "--from-step", str(STEPS - SAVE_INTERVAL + 1))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical, bit for bit" in done.stdout


def test_view_names_the_pictures(journey: Journey) -> None:
    done = journey.trinity("view", "--index", "0", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)
    (picture,) = row["images"]
    assert (journey.run.job / picture).is_file()
    assert picture in journey.trinity("view", "--index", "0").stdout


def test_each_sample_has_the_picture_of_its_row(journey: Journey) -> None:
    lines = (journey.run.job / "buffer/experience_buffer.jsonl").read_text().splitlines()
    seen = set()
    for line in map(json.loads, lines):
        (picture,) = line["images"]
        row = line["task_id"].split("/")[3]
        kept = (journey.run.job / picture).read_bytes()
        assert kept == (journey.run.folder / f"data/train/{row}.png").read_bytes()
        assert hashlib.sha256(kept).hexdigest() in picture
        seen.add(line["step"])
    assert seen == set(range(1, STEPS + 1))


def test_pictures_leave_the_log_with_their_groups_and_not_before(journey: Journey) -> None:
    """The run keeps no more of its log than its checkpoints can ask for."""
    groups, tasks, blobs = asyncio.run(asyncio.wait_for(_on_the_broker(journey.run), 120))
    taken = _taken_by_step(journey.run)
    oldest = min(int(folder.name.removeprefix("global_step_")) for folder in journey.run.job.glob("global_step_*"))
    needed = {sequence for step, members in taken.items() if step > oldest for sequence in members}
    assert needed and needed <= groups.keys() < set().union(*taken.values())
    for group in groups.values():
        pictures = {digest(image) for image in group.task.images}
        assert len(group.task.images) == 1
        assert all({image.digest for image in one.images} == pictures for one in group.experiences)
    assert tasks <= 2  # the queue's end stays
    assert blobs == 0


async def _on_the_broker(run: TrinityRun) -> tuple[dict[int, Group], int, int]:
    """What the run has left there: groups by their sequence, how many tasks, how many pieces of long groups."""
    server, names = NatsServer(run.job / "nats", users=run.job / "identity/nats"), RunNames(run_id("vision", "squares"))
    server.start()
    try:
        async with await connect(server.url, "test", creds=server.admin()) as broker:
            found = {m.sequence: decode_outcome(m.data) for m in await messages(broker, names.experiences_stream)}
            counts = [(await broker.state(name)).messages for name in (names.tasks_stream, names.blobs_stream)]
    finally:
        server.stop()
    return {sequence: one for sequence, one in found.items() if isinstance(one, Group)}, counts[0], counts[1]


def _taken_by_step(run: TrinityRun) -> dict[int, list[int]]:
    """Log sequences of each step's groups."""
    lines = (run.job / "monitor/batches.jsonl").read_text().splitlines()
    return {line["step"]: line["groups"] for line in map(json.loads, lines)}
