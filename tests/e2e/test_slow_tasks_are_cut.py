"""A task of every step takes ten minutes: with explorer.over_rollout the run ends in one, and says what it cut.

Two ranks of the trainer share steps of three groups. Processes are forked, and transformers samples where vLLM would
(support/programs/forked_run.py).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.programs.forked_run import ForkedRun, trinity
from support.programs.run import write_config

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS, TASKS, ROLLOUTS = 3, 4, 3
SLOW = '''
import asyncio

from trinity.explorer.workflows.single_turn import SimpleWorkflow
from trinity.plugins import workflow


@workflow("slow_at_times")
class SlowAtTimes(SimpleWorkflow):
    """Every fourth task takes ten minutes."""

    async def run(self):
        if self.task.ordinal % 4 == 2:
            await asyncio.sleep(600)
        return await super().run()
'''


@pytest.fixture
def run(repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path: Path) -> Iterator[ForkedRun]:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/slow.py").write_text(SLOW)
    taskset = {
        "name": "sums",
        "path": str(quickstart_data),
        "split": "train",
        "format": {"prompt_key": "question", "response_key": "answer"},
        "default_workflow_type": "slow_at_times",
        "default_reward_fn_type": "accuracy_reward",
    }
    changes: dict[str, Any] = {
        "model": {"model_path": str(quickstart_model)},
        "algorithm": {"repeat_times": ROLLOUTS},
        "buffer": {
            "batch_size": TASKS,
            "total_steps": STEPS,
            "explorer_input": {"taskset": taskset, "eval_tasksets": []},
        },
        "explorer": {"max_timeout": 900, "over_rollout": {"ratio": 0.25, "wait_after_min": 1.0}},
        "trainer": {"num_ranks": 2},
        "stages": [],
    }
    config = write_config(repository / "examples/quickstart/arithmetic.yaml", tmp_path / "slow.yaml", changes)
    started = ForkedRun(config, tmp_path, TRINITY_PLUGIN_DIRS=str(tmp_path / "plugins"), OMP_NUM_THREADS="1")
    yield started
    started.end()


def test_a_run_does_not_wait_for_its_slowest_tasks_and_says_so(run: ForkedRun, tmp_path: Path) -> None:
    run.start()
    assert run.finish(240) == 0, run.tail()
    summary = json.loads((run.job / "summary.json").read_text())
    counts = [summary[name] for name in ("groups_stored", "dead_letters", "cut_tasks", "outstanding")]
    assert (summary["steps"], summary["groups_fed"]) == (STEPS, sum(counts))
    assert counts[:3] == [STEPS * (TASKS - 1), 0, STEPS]
    trained = [json.loads(line) for line in (run.job / "monitor/batches.jsonl").read_text().splitlines()]
    assert [len(one["groups"]) for one in trained] == [TASKS - 1] * STEPS
    lines = [json.loads(line) for line in (run.job / "monitor/trainer.jsonl").read_text().splitlines()]
    assert all(line["actor/grad_norm"] >= 0 for line in lines)

    def asked(*arguments: str) -> str:
        done = trinity([*arguments, "--config", str(run.config)], run.environment, tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for step in range(1, STEPS + 1):
        entry = json.loads(asked("batch", "show", str(step), "--json"))
        assert [task["ordinal"] for task in entry["cut"]] == [(step - 1) * TASKS + 2]
        assert all(task["task_id"].startswith("sums/0/") for task in entry["cut"])
        assert not {task["task_id"] for task in entry["cut"]} & {group["task_id"] for group in entry["groups"]}
    assert "cut, as the step did not wait for them" in asked("batch", "show", "1")
