"""A task that always fails, mended and fed again, and steps trained again from the ledger: beside the run and after it.

The trainer is held by its own Pause wherever the journey looks around. The reward function fails for one row for as
long as a file is there. Processes are forked, and transformers samples where vLLM would
(support/programs/forked_run.py).
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.programs.forked_run import ForkedRun, trinity
from support.programs.run import Status, process_of, write_config
from trinity.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, SAVE_INTERVAL, GROUPS, POISON = 6, 2, 4, 2  # POISON: a row of the first batch
ATTEMPTS = 2
REWARD = """
from pathlib import Path
from trinity.plugins import reward_function

FLAG, QUESTION = Path({flag!r}), {question!r}

@reward_function("poisoned")
def poisoned(item, args):
    if item.task["question"] == QUESTION and FLAG.exists():
        raise RuntimeError("this row cannot be scored\\nas long as the flag is there")
    return (sum(item.token_ids) % 5) / 4
"""


@dataclass
class Journey:
    """What was seen on the way."""

    run: ForkedRun
    letters: list[dict[str, Any]] = field(default_factory=list)
    letter: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    mended: dict[str, int] = field(default_factory=dict)
    letters_after: list[dict[str, Any]] = field(default_factory=list)
    batch_beside: dict[str, Any] = field(default_factory=dict)
    counts_beside: list[dict[str, int]] = field(default_factory=list)
    replay_beside: "subprocess.CompletedProcess[str] | None" = None
    code: int = -1

    def trinity(self, *arguments: str, seconds: float = 200) -> "subprocess.CompletedProcess[str]":
        given = [*arguments, "--config", str(self.run.config)]
        return trinity(given, self.run.environment, self.run.folder, seconds)

    def json(self, *arguments: str) -> Any:
        done = self.trinity(*arguments, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def journey(repository: Path, quickstart_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Journey]:
    folder = tmp_path_factory.mktemp("replay")
    data = folder / "data"
    subprocess.run(
        [sys.executable, str(repository / "examples/quickstart/make_data.py"), str(data), "--test-size", "4"],
        check=True, timeout=60, capture_output=True,
    )  # fmt: skip
    question = json.loads((data / "train.jsonl").read_text().splitlines()[POISON])["question"]
    flag = folder / "flag"
    flag.touch()
    (folder / "plugins").mkdir()
    (folder / "plugins/rewards.py").write_text(REWARD.format(flag=str(flag), question=question))
    taskset = {"default_reward_fn_type": "poisoned", "data_selector": {"selector_type": "sequential"}}
    short = {
        "stages": [],
        "buffer": {
            "batch_size": GROUPS,
            "total_steps": STEPS,
            "explorer_input": {"taskset": taskset, "eval_tasksets": []},
        },
        "explorer": {"max_retry_times": ATTEMPTS - 1},
        "trainer": {"save_interval": SAVE_INTERVAL, "max_checkpoints_to_keep": STEPS},
    }
    config = write_config(repository / "examples/quickstart/arithmetic.yaml", folder / "arithmetic.yaml", short)
    environment = {
        "TRINITY_MODEL_PATH": str(quickstart_model),
        "TRINITY_TASKSET_PATH": str(data),
        "TRINITY_PLUGIN_DIRS": str(folder / "plugins"),
    }
    run = ForkedRun(config, folder, **environment)
    try:
        yield _travel(Journey(run), flag)
    finally:
        run.end()


def _travel(seen: Journey, flag: Path) -> Journey:
    run = seen.run
    run.start()
    status = run.until(lambda s: process_of(s, "trainer")["health"].endswith("SERVING"), 120, "the trainer answers")
    with run.channel(str(process_of(status, "trainer")["address"])) as channel:
        trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
        assert trainer.Pause(trainer_pb2.PauseRequest(), timeout=120).step == 0

        failed = run.until(lambda s: _is_still(s) and s["groups"]["dead_letters"], 200, "a dead letter")
        seen.failed = failed["groups"]
        seen.letters = seen.json("deadletters", "list")
        ordinal = str(seen.letters[0]["ordinal"])
        seen.letter = seen.json("deadletters", "show", ordinal)
        flag.unlink()
        assert seen.json("deadletters", "retry", ordinal) == {"retried": [int(ordinal)]}
        mended = run.until(lambda s: _is_still(s) and not s["groups"]["dead_letters"], 60, "the task lives again")
        seen.mended = mended["groups"]
        seen.letters_after = seen.json("deadletters", "list")

        _train_until(trainer, SAVE_INTERVAL + 1)
        seen.counts_beside = [_settled(run)]
        seen.batch_beside = seen.json("batch", "show", "1", "--texts", "2")
        seen.replay_beside = seen.trinity("replay", "--from-step", "1", "--to-step", str(SAVE_INTERVAL))
        seen.counts_beside.append(_settled(run))
        trainer.Resume(trainer_pb2.ResumeRequest(), timeout=10)
    seen.code = run.finish(120)
    return seen


def _is_still(status: Status) -> bool:
    """Everything that was fed has ended, and no version is on its way whose going LIVE would feed more."""
    groups = status["groups"]
    return bool(groups and groups["fed"] and not groups["outstanding"] and not status["weights"]["newer"])


def _settled(run: ForkedRun) -> dict[str, int]:
    """Still, and still so two seconds later: after a version went LIVE the buffer takes a moment to feed more."""
    deadline, before = time.monotonic() + 60, None
    while (counts := run.until(_is_still, 60, "every task has ended")["groups"]) != before:
        assert time.monotonic() < deadline
        before = counts
        time.sleep(2)
    return counts


def _train_until(trainer: trainer_pb2_grpc.TrainerServiceStub, step: int) -> None:
    """A few steps and no more: the trainer is let go for a moment at a time."""
    deadline = time.monotonic() + 60
    while trainer.Pause(trainer_pb2.PauseRequest(), timeout=60).step < step:
        assert time.monotonic() < deadline
        trainer.Resume(trainer_pb2.ResumeRequest(), timeout=10)
        time.sleep(0.2)


def _trained(journey: Journey) -> list[int]:
    lines = (journey.run.job / "monitor/batches.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_task_that_always_fails_is_listed_with_its_cause_and_its_row(journey: Journey) -> None:
    (letter,) = journey.letters
    assert (letter["cause"], letter["attempts"]) == ("scorer_error", ATTEMPTS)
    assert "this row cannot be scored" in letter["error"]
    assert letter["task_id"].endswith(f"/{POISON}")
    assert journey.failed["fed"] == journey.failed["stored"] + 1
    assert journey.letter["task"]["row"]["answer"]
    assert "as long as the flag is there" in journey.letter["error"]


def test_after_mending_it_is_fed_again_and_the_counts_are_complete(journey: Journey) -> None:
    assert journey.mended["fed"] == journey.mended["stored"] > 0
    assert journey.mended["dead_letters"] == journey.mended["outstanding"] == 0
    assert journey.letters_after == []


def test_the_batch_of_a_step_is_shown_beside_the_run(journey: Journey) -> None:
    batch = journey.batch_beside
    assert (batch["step"], batch["policy"], batch["partial"]) == (1, "fifo", False)
    assert len(batch["groups"]) == GROUPS
    for group in batch["groups"]:
        assert (group["kept"], group["use_count"], group["staleness_steps"]) == (8, 1, 0)
        texts = group["experiences"]
        assert len(texts) == 2
        assert all(text["prompt"] and text["versions"] for text in texts)
    rewards = [group["reward_mean"] for group in batch["groups"]]
    assert batch["reward_mean"] == pytest.approx(sum(rewards) / GROUPS)


def test_a_replay_beside_the_run_is_identical_and_the_run_notices_nothing(journey: Journey) -> None:
    done = journey.replay_beside
    assert done is not None
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical, bit for bit" in done.stdout
    before, after = journey.counts_beside
    assert before == after
    assert journey.code == 0, journey.run.tail()
    assert _trained(journey) == list(range(1, STEPS + 1)), "every step once"
    summary = json.loads((journey.run.job / "summary.json").read_text())
    assert summary["groups_fed"] == summary["groups_stored"]
    assert summary["dead_letters"] == summary["outstanding"] == 0


def test_a_replay_of_the_finished_run_from_a_checkpoint_is_identical(journey: Journey) -> None:
    done = journey.trinity("replay", "--from-step", str(SAVE_INTERVAL + 1))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical, bit for bit" in done.stdout
    folder = journey.run.job / f"replay/from_{SAVE_INTERVAL + 1}"
    found = json.loads((folder / "replay.json").read_text())
    assert found["begin"] == SAVE_INTERVAL
    assert [step["step"] for step in found["steps"]] == list(range(SAVE_INTERVAL + 1, STEPS + 1))
    assert all(step["compared"] and not step["different"] for step in found["steps"])
    assert all(abs(step["original"]["actor/grad_norm"]) > 0 for step in found["steps"]), "something was learnt"
    assert found["weights"]["compared"]
    assert found["weights"]["tensors"] > 10
    assert (folder / f"global_step_{STEPS}/actor/huggingface/model.safetensors").is_file()


def test_a_replay_with_another_learning_rate_is_found_out(journey: Journey) -> None:
    first = STEPS - 1
    done = journey.trinity("replay", "algorithm.optimizer.lr=2e-4", "--from-step", str(first), "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert not found["identical"]
    assert found["steps"][0]["different"] == ["actor/lr"], "the first step begins at the same weights"
    assert "actor/pg_loss" in found["steps"][1]["different"]
    assert len(found["weights"]["different"]) == found["weights"]["tensors"]


def test_the_finished_run_can_be_looked_at_and_not_changed(journey: Journey) -> None:
    assert journey.json("deadletters", "list") == []
    shown = journey.trinity("batch", "show", str(STEPS), "--texts", "1")
    assert shown.returncode == 0, shown.stderr
    assert f"step {STEPS}: {GROUPS} groups" in shown.stdout
    assert "--- response 0: reward" in shown.stdout
    for refused, said in (
        (("batch", "show", str(STEPS + 1)), f"the newest is {STEPS}"),
        (("deadletters", "retry", "--all"), "`trinity run` with the same YAML and more steps"),
        (("deadletters", "show", "1"), "task 1 has no dead letter"),
        (("replay", "--from-step", str(STEPS + 1)), f"has trained steps 1 to {STEPS}"),
        (("batch", "show", "1", "--stage", "sft"), "no stages"),
    ):
        done = journey.trinity(*refused)
        assert done.returncode in (1, 2), done.stdout
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1
    again = journey.trinity("run")
    assert again.stdout.startswith("nothing left to do"), again.stdout + again.stderr
    assert not journey.run.left_alive(5)
