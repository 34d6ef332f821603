"""The workflow of docs/from_trinity.md, an OpenAI client and its history, trains the quickstart.

So do an algorithm and an operator that were written for Trinity-RFT.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.programs.run import TrinityRun, write_config
from trinity.archive.reader import read_experiences
from trinity.data.experience import Truncation

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 2


@pytest.fixture
def run(repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path: Path) -> Iterator[TrinityRun]:
    (tmp_path / "plugins").mkdir()
    (code,) = re.findall(r"```python\n(.*?)```", (repository / "docs/from_trinity.md").read_text(), re.DOTALL)
    (tmp_path / "plugins/agent.py").write_text(code)
    for path in ("algorithms/own_algorithm.py", "operators/own_operator.py"):
        given = repository / "tests/support/fakes/trinity_rft" / path
        (tmp_path / "plugins" / given.name).write_text(given.read_text())
    taskset = {
        "name": "sums",
        "path": str(quickstart_data),
        "split": "train",
        "format": {"prompt_key": "question", "response_key": "answer"},
        "default_workflow_type": "history_agent",
        "default_reward_fn_type": "accuracy_reward",
    }
    changes: dict[str, Any] = {
        "model": {"model_path": str(quickstart_model)},
        "algorithm": {
            "algorithm_type": "faded_worst",
            "advantage_fn_args": {"keep_worst": True},
            "kl_loss_fn": None,
            "repeat_times": 2,
        },
        "data_processor": {"experience_pipeline": {"operators": [{"name": "near_the_best", "args": {"margin": 9.0}}]}},
        "buffer": {
            "batch_size": 4,
            "total_steps": STEPS,
            "explorer_input": {"taskset": taskset, "eval_tasksets": []},
            "trainer_input": {"experience_buffer": {"path": str(tmp_path / "trained.jsonl"), "storage_type": "file"}},
        },
        "stages": [],
    }
    config = write_config(repository / "examples/quickstart/arithmetic.yaml", tmp_path / "agent.yaml", changes)
    started = TrinityRun(config, tmp_path)
    yield started
    started.end()


def test_an_agent_an_algorithm_and_an_operator_of_trinity_rft_train(run: TrinityRun, tmp_path: Path) -> None:
    run.start("--plugin-dir", str(tmp_path / "plugins"))
    assert run.finish(700) == 0, run.tail()
    groups = list(read_experiences(str(tmp_path / "trained.jsonl"), "experience_buffer"))
    assert len(groups) == STEPS * 4
    for group in groups:
        assert [experience.rollout for experience in group.experiences] == [0, 1]
        for experience in group.experiences:
            whole = experience.truncation is Truncation.NONE  # the operator masks the others
            assert (experience.action_mask == whole).all() and (experience.logprobs <= 0).all()
            assert np.isin(experience.reward, (0.0, 1.0)) and experience.response_text
