"""Agents on OpenAI's SDK in a whole run, that of examples/agents and one outside: what they were sent is trained.

Both answer the same rows, each those of a taskset of its own.
"""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from support.checks.sampled_replies import count_trained, sampled_replies
from support.programs.run import TrinityRun, write_config
from trinity.archive.reader import read_experiences
from trinity.runtime.process import free_port
from trinity.sdk import Session, SessionRefused, open_session

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 2
# The client notes the ids that the engine sampled, as vLLM's answers have them.
NOTES = """
import json, os
from types import SimpleNamespace


def noting(client):
    async def create(**asked):
        done = await client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
        with open(os.environ["SAMPLED_IDS"], "a") as file:
            for choice in done.choices:
                file.write(json.dumps([done.prompt_token_ids, choice.token_ids]) + "\\n")
        return done

    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
"""


class Outside:
    """A program with an agent of its own: it plays the sessions of a run until it is told to stop."""

    def __init__(self, port: int, keys: Path, notes: Path) -> None:
        self.base_url, self._keys, self._notes = f"http://127.0.0.1:{port}/v1", keys, notes
        self.rewards: list[float] = []
        self.abandoned = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._play_all, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(120)
        assert not self._thread.is_alive()

    def _play_all(self) -> None:
        while not self._stop.is_set():
            try:
                with open_session(self.base_url, self._keys.read_text().strip(), wait_seconds=2) as session:
                    self._play(session)
            except (SessionRefused, OSError, openai.OpenAIError):  # none waits, the run has not begun, or it has ended
                time.sleep(0.2)
            except ZeroDivisionError:
                self.abandoned += 1

    def _play(self, session: Session) -> None:
        with openai.OpenAI(base_url=session.base_url, api_key=session.key, timeout=300) as client:
            messages: list[Any] = [{"role": "user", "content": session.row["question"]}]
            for _ in range(2):
                asked: Any = {"model": "policy", "messages": messages, "extra_body": {"return_token_ids": True}}
                done: Any = client.chat.completions.create(**asked)
                (choice,) = done.choices
                with self._notes.open("a") as file:
                    file.write(json.dumps([done.prompt_token_ids, choice.token_ids]) + "\n")
                messages += [choice.message.model_dump(), {"role": "user", "content": "Are you sure?"}]
        if not self.abandoned:
            raise ZeroDivisionError("the first session is abandoned")
        session.reward = float(len(self.rewards) % 2)
        self.rewards.append(session.reward)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    program = Outside(free_port(), tmp_path / "keys", tmp_path / "sampled.jsonl")
    yield program
    program.stop()


@pytest.fixture
def run(
    repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path: Path, outside: Outside
) -> Iterator[TrinityRun]:
    shutil.copytree(repository / "examples/agents/plugins", tmp_path / "plugins")
    (tmp_path / "plugins/notes.py").write_text(NOTES)
    workflow = tmp_path / "plugins/sums_workflow.py"
    given = workflow.read_text().replace("agent.asynchronous", "noting(agent.asynchronous)")
    workflow.write_text(f"from notes import noting\n{given}")
    (tmp_path / "keys").write_text("key-of-the-test\n")
    example = repository / "examples/agents/sums.yaml"
    taskset = yaml.safe_load(example.read_text())["buffer"]["explorer_input"]["taskset"]
    taskset["path"] = str(quickstart_data)
    external = {**taskset, "name": "outside", "default_workflow_type": "external_agent_workflow"}
    port = int(outside.base_url.removesuffix("/v1").rpartition(":")[2])
    changes: dict[str, Any] = {
        "model": {"model_path": str(quickstart_model), "max_response_tokens": 24},
        "algorithm": {"repeat_times": 2},
        "buffer": {
            "batch_size": 4,
            "total_steps": STEPS,
            "explorer_input": {
                "taskset": None,
                "tasksets": [taskset, external],
                "eval_tasksets": [],
            },
            "trainer_input": {"experience_buffer": {"path": str(tmp_path / "trained.jsonl"), "storage_type": "file"}},
        },
        "explorer": {"record": True, "proxy_port": port, "api_keys_file": str(tmp_path / "keys")},
        "stages": [],
    }
    config = write_config(example, tmp_path / "sums.yaml", changes)
    started = TrinityRun(config, tmp_path, SAMPLED_IDS=str(tmp_path / "sampled.jsonl"))
    yield started
    started.end()


def test_every_token_that_is_trained_was_sampled_after_the_tokens_before_it(
    run: TrinityRun, outside: Outside, tmp_path: Path
) -> None:
    run.start("--plugin-dir", str(tmp_path / "plugins"))
    outside.start()
    assert run.finish(700) == 0, run.tail()
    outside.stop()
    assert outside.abandoned == 1
    assert f"agents open sessions at {outside.base_url}" in run.output.read_text()
    groups = list(read_experiences(str(tmp_path / "trained.jsonl"), "experience_buffer"))
    assert len(groups) == STEPS * 4
    assert {group.task.taskset for group in groups} == {"sums", "outside"}
    assert all({experience.rollout for experience in group.experiences} == {0, 1} for group in groups), "whole groups"
    trained = [experience for group in groups for experience in group.experiences]
    assert count_trained(trained, sampled_replies(tmp_path / "sampled.jsonl")) >= STEPS * 4 * 2
