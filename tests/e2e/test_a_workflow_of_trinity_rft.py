"""The workflow of docs/from_trinity.md, an OpenAI client and its history, trains the quickstart."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.runs.run import TrinityRun, write_config
from trinity.data.archive.reader import read_experiences

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 2


@pytest.fixture
def run(repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path: Path) -> Iterator[TrinityRun]:
    (tmp_path / "plugins").mkdir()
    (code,) = re.findall(r"```python\n(.*?)```", (repository / "docs/from_trinity.md").read_text(), re.DOTALL)
    (tmp_path / "plugins/agent.py").write_text(code)
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
        "algorithm": {"repeat_times": 2},
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


def test_an_agent_of_trinity_rft_is_trained_on_its_history(run: TrinityRun, tmp_path: Path) -> None:
    run.start("--plugin-dir", str(tmp_path / "plugins"))
    assert run.finish(700) == 0, run.tail()
    groups = list(read_experiences(str(tmp_path / "trained.jsonl"), "experience_buffer"))
    assert len(groups) == STEPS * 4
    for group in groups:
        assert [experience.rollout for experience in group.experiences] == [0, 1]
        for experience in group.experiences:
            assert experience.action_mask.all() and (experience.logprobs <= 0).all()
            assert np.isin(experience.reward, (0.0, 1.0)) and experience.response_text
