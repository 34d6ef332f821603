"""What a task asks of an explorer, from the YAML."""

from pathlib import Path

import pytest

from trinity.config import Config, make_plan
from trinity.data.experience import TaskKind
from trinity.data.task_source import TaskSource

pytestmark = pytest.mark.core


@pytest.mark.parametrize(("algorithm", "greedy"), [("remax", True), ("grpo", False)])
def test_only_remax_asks_for_a_greedy_rollout_and_only_to_train(algorithm: str, greedy: bool, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    taskset = {"name": "sums", "path": str(tmp_path), "split": "train"}
    config = Config.model_validate(
        {
            "model": {"model_path": "m", "max_model_len": 64},
            "algorithm": {"algorithm_type": algorithm, "repeat_times": 4},
            "buffer": {"batch_size": 2, "explorer_input": {"taskset": taskset, "eval_tasksets": [taskset]}},
        }
    )
    plan = make_plan(config)
    training = TaskSource.open("run", plan, plan.tasksets[0], TaskKind.TRAIN).train_task(0, 0, 0)
    evaluation = TaskSource.open("run", plan, plan.eval_tasksets[0], TaskKind.EVALUATION).evaluation_task(0, 0, 0)
    assert (training.greedy_baseline, evaluation.greedy_baseline) == (greedy, False)
    assert training.repeat_times == 4
