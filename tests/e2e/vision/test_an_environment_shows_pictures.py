"""A tiny vision-language model plays an environment that shows a picture at each of two turns, on real vLLM and
DeepSpeed, while its explorer is killed.
"""

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from support.checks.audit import messages
from support.fakes.data.vision import EXAMPLE, make_model
from support.programs.run import TrinityRun, kill_process, process_of, write_config
from support.servers.nats import NatsServer
from trinity.data.experience import Group, Limits
from trinity.data.images import digest, size
from trinity.data.vision import image_rules
from trinity.data.wire import decode_outcome
from trinity.runtime.broker import connect
from trinity.runtime.names import RunNames, run_id

pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("torchvision") is None, reason="vLLM's Qwen2.5-VL needs torchvision: '.[vision]'"
    ),
]

STEPS, SAVE_INTERVAL, BATCH, ROLLOUTS = 12, 4, 8, 4
CHANGES = {
    "buffer": {"total_steps": STEPS, "batch_size": BATCH},
    "algorithm": {"repeat_times": ROLLOUTS},
    "trainer": {"save_interval": SAVE_INTERVAL},
}


@dataclass
class Journey:
    run: TrinityRun
    code: int

    def trinity(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        plugins = str(EXAMPLE / "plugins")
        command = [sys.executable, "-m", "trinity.cli.main", *arguments, "--config", str(self.run.config)]
        environment = {**self.run.environment, "TRINITY_PLUGIN_DIRS": plugins}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    def samples(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run.job / "buffer/experience_buffer.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def journey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Journey]:
    folder = tmp_path_factory.mktemp("pictures")
    make_data = [sys.executable, str(EXAMPLE / "make_data.py"), "--episodes", str(folder / "data")]
    subprocess.run(make_data, check=True, timeout=60, capture_output=True)
    config = write_config(EXAMPLE / "counting.yaml", folder / "counting.yaml", CHANGES)
    paths = {"TRINITY_MODEL_PATH": str(make_model(folder / "model")), "TRINITY_TASKSET_PATH": str(folder / "data")}
    run = TrinityRun(config, folder, **paths, TRINITY_BUFFER_LOG_KEEP_GIB="0")
    try:
        run.start("--plugin-dir", str(EXAMPLE / "plugins"))
        kill_process(run.until(lambda status: (status["step"] or 0) >= 3, 400, "step 3"), "explorer")
        run.until(lambda status: process_of(status, "explorer")["restarts"] >= 1, 120, "the explorer is back")
        yield Journey(run, run.finish(500))
    finally:
        run.end()


def test_the_counts_add_up(journey: Journey) -> None:
    assert journey.code == 0, journey.run.tail()
    summary = json.loads((journey.run.job / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["groups_fed"] == summary["groups_stored"] == BATCH * STEPS
    assert summary["dead_letters"] == summary["outstanding"] == 0


def test_trainer_and_engine_agree_on_every_token_of_both_turns(journey: Journey) -> None:
    lines = [json.loads(line) for line in (journey.run.job / "log/trainer.log").read_text().splitlines()]
    kernels = [line["actor/mismatch/kernel_logprob_diff"] for line in lines
               if "actor/mismatch/kernel_logprob_diff" in line]  # fmt: skip
    assert kernels
    assert max(kernels) < 1e-4, kernels


def test_each_sample_has_both_pictures_and_is_shown_with_them(journey: Journey) -> None:
    samples = journey.samples()
    assert len(samples) >= STEPS * BATCH * ROLLOUTS
    by_task: dict[str, set[tuple[str, ...]]] = {}
    for sample in samples:
        assert sample["metrics"]["steps"] == 2
        assert len(sample["images"]) == 2
        assert all((journey.run.job / picture).is_file() for picture in sample["images"])
        by_task.setdefault(sample["task_id"], set()).add(tuple(sample["images"]))
    assert all(len(shown) == 1 for shown in by_task.values()), "rollouts of a group are shown the same pictures"
    assert len({shown for of_task in by_task.values() for shown in of_task}) > len(by_task) // 2
    done = journey.trinity("view", "--index", "0", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)
    assert len(row["images"]) == 2
    shown = journey.trinity("view", "--index", "0").stdout
    assert all(picture in shown for picture in row["images"])


def test_a_replay_is_equal_bit_for_bit(journey: Journey) -> None:
    done = journey.trinity("replay", "--from-step", str(STEPS - SAVE_INTERVAL + 1))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical, bit for bit" in done.stdout


def test_the_log_has_each_picture_of_a_group_once_where_it_was_shown(journey: Journey) -> None:
    groups, blobs = asyncio.run(asyncio.wait_for(_on_the_broker(journey.run), 120))
    rules = image_rules(journey.run.environment["TRINITY_MODEL_PATH"])
    assert groups and rules is not None
    for data, group in groups:
        group.check(Limits(images=rules))
        shown = {image.file for experience in group.experiences for image in experience.images}
        assert [data.count(file) for file in shown] == [1, 1]
        for experience in group.experiences:
            first, second = experience.images
            assert first.start < experience.prompt_length < second.start
            assert rules.tokens(*size(second.file)) == 16
    assert blobs == 0
    kept = {file.stem for file in (journey.run.job / "buffer/images").iterdir()}
    assert {
        digest(image.file).hex() for _, group in groups for one in group.experiences for image in one.images
    } <= kept


async def _on_the_broker(run: TrinityRun) -> tuple[list[tuple[bytes, Group]], int]:
    """What the run has left there: groups with their messages, and how many pieces of long ones."""
    server, names = (
        NatsServer(run.job / "nats", users=run.job / "identity/nats"),
        RunNames(run_id("vision", "counting")),
    )
    server.start()
    try:
        async with await connect(server.url, "test", creds=server.admin()) as broker:
            found = [(m.data, decode_outcome(m.data)) for m in await messages(broker, names.experiences_stream)]
            blobs = (await broker.state(names.blobs_stream)).messages
    finally:
        server.stop()
    return [(data, one) for data, one in found if isinstance(one, Group)], blobs
