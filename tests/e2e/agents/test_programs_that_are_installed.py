"""Programs of examples/agents in a whole run, each in a process of its own and as its package has it: exactly what the
engine sampled is trained."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.checks.sampled_replies import count_trained, sampled_replies
from support.programs.run import TrinityRun, write_config
from trinity.archive.reader import read_experiences

INSTALLED = Path(os.environ.get("AGENT_BIN", Path(__file__).parents[3] / "build/agents/venv/bin"))
pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (INSTALLED / "mini").exists(), reason="the programs are not installed: make programs"),
]

STEPS, ROLLOUTS = 2, 2
# Those that call `add`, and how the conversations of each begin and call.
ADDING = ("mcp_agent", "scope_agent", "verifiers_agent")
AGENTS = (*ADDING, "mini_agent")
CONVERSATIONS = {"add": ["--tool", "add"], "system": ["--tool", "add", "--system"], "bash": ["--tool", "bash"]}
# The explorer notes what its engine gave for each call of a session: the programs do not ask for token ids.
NOTES = """
import json, os
from trinity.explorer.sessions.recording import Recording
from trinity.explorer.workflows.agents import AgentWorkflow

note = Recording.note


async def noting(self, output, serials, loads):
    made = await note(self, output, serials, loads)
    with open(os.environ["SAMPLED_IDS"], "a") as file:
        for choice in output.outputs:
            assert choice.finish_reason is not None, "a reply that is streamed comes in parts"
            file.write(json.dumps([list(output.prompt_token_ids), list(choice.token_ids)]) + "\\n")
    return made


Recording.note = noting
"""


@pytest.fixture
def run(repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path: Path) -> Iterator[TrinityRun]:
    shutil.copytree(repository / "examples/agents/plugins", tmp_path / "plugins")
    (tmp_path / "plugins/notes.py").write_text(NOTES)
    example = repository / "examples/agents/sums.yaml"
    told = yaml.safe_load(example.read_text())
    taskset = {**told["buffer"]["explorer_input"]["taskset"], "path": str(quickstart_data)}
    tasksets = [{**taskset, "name": name, "default_workflow_type": name} for name in AGENTS]
    sft, rft = told["stages"]
    sft["buffer"]["trainer_input"]["experience_buffer"]["path"] = str(calls(repository, quickstart_data, tmp_path))
    changes: dict[str, Any] = {
        "model": {"model_path": str(quickstart_model)},
        "algorithm": {"repeat_times": ROLLOUTS},
        "buffer": {
            "batch_size": len(AGENTS),
            "total_steps": STEPS,
            "explorer_input": {"taskset": None, "tasksets": tasksets, "eval_tasksets": []},
            "trainer_input": {"experience_buffer": {"path": str(tmp_path / "trained.jsonl"), "storage_type": "file"}},
        },
        "explorer": {"runner_per_model": 2},
        "stages": [sft, rft],
    }
    config = write_config(example, tmp_path / "sums.yaml", changes)
    places = {"AGENT_BIN": str(INSTALLED), "AGENT_PROGRAMS": str(repository / "examples/agents/programs")}
    started = TrinityRun(config, tmp_path, SAMPLED_IDS=str(tmp_path / "sampled.jsonl"), **places)
    yield started
    started.end()


def calls(repository: Path, data: Path, folder: Path) -> Path:
    """Conversations with the tools of all."""
    make, lines = repository / "examples/agents/make_data.py", []
    for name, options in CONVERSATIONS.items():
        made = folder / name
        subprocess.run([sys.executable, make, made, "--from", data, *options], check=True)
        lines.append((made / "calls/train.jsonl").read_text())
    (folder / "calls").mkdir()
    (folder / "calls/train.jsonl").write_text("".join(lines))
    return folder / "calls"


def test_every_token_that_is_trained_was_sampled_after_the_tokens_before_it(run: TrinityRun, tmp_path: Path) -> None:
    run.start("--plugin-dir", str(tmp_path / "plugins"))
    assert run.finish(800) == 0, run.tail()
    groups = list(read_experiences(str(tmp_path / "trained.jsonl"), "experience_buffer"))
    assert len(groups) == STEPS * len(AGENTS)
    assert {group.task.taskset for group in groups} == set(AGENTS)
    for group in groups:
        assert {experience.rollout for experience in group.experiences} == set(range(ROLLOUTS)), "a group is whole"
    # After so short an SFT half of the calls of `add` are well-formed, and one in six of the longer ones of `bash`.
    adding = [one for group in groups if group.task.taskset in ADDING for one in group.experiences]
    assert any(one.metrics["turns"] > 1 and "<tool_call>" in one.response_text for one in adding)
    trained = [experience for group in groups for experience in group.experiences]
    assert count_trained(trained, sampled_replies(tmp_path / "sampled.jsonl")) >= len(groups) * ROLLOUTS
