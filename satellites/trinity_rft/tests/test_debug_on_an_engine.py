"""`trinity debug --watch` on a real engine: a plugin file is edited, broken and mended, and the engine stays up."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

_SECONDS = 240.0


class Watching:
    """The command, and what it has written."""

    def __init__(self, folder: Path, command: list[str], environment: dict[str, str]) -> None:
        self.results, self._said = folder / "results.json", folder / "said.txt"
        with self.results.open("w") as out, self._said.open("w") as said:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=said, start_new_session=True
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    def until_waiting(self, times: int) -> list[dict[str, Any]]:
        """All results, once it has said so often that it waits."""
        deadline = time.monotonic() + _SECONDS
        while self.said.count("waiting for a change") < times:
            assert self.process.poll() is None and time.monotonic() < deadline, self.said
            time.sleep(0.2)
        text, found, decoder = self.results.read_text().strip(), [], json.JSONDecoder()
        while text:
            result, end = decoder.raw_decode(text)
            found.append(result)
            text = text[end:].lstrip()
        return found


@pytest.fixture
def plugin(repository: Path, tmp_path: Path) -> Path:
    (tmp_path / "plugins").mkdir()
    (code,) = re.findall(r"```python\n(.*?)```", (repository / "docs/from_trinity.md").read_text(), re.DOTALL)
    file = tmp_path / "plugins" / "agent.py"
    file.write_text(code)
    return file


@pytest.fixture
def watching(repository: Path, quickstart_model: Path, quickstart_data: Path, plugin: Path) -> Iterator[Watching]:
    taskset = "buffer.explorer_input.taskset"
    command = [
        sys.executable, "-m", "trinity.cli.main", "debug", str(repository / "examples/quickstart/arithmetic.yaml"),
        "algorithm.repeat_times=2", f"{taskset}.default_workflow_type=history_agent",
        "--watch", str(plugin), "--prompt", "1+1=", "--truth", "2", "--json",
    ]  # fmt: skip
    paths = {"TRINITY_MODEL_PATH": str(quickstart_model), "TRINITY_TASKSET_PATH": str(quickstart_data)}
    started = Watching(plugin.parent.parent, command, {**os.environ, **paths})
    yield started
    if started.process.poll() is None:
        os.killpg(started.process.pid, signal.SIGKILL)


def children_of(pid: int) -> set[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for path in tasks for child in path.read_text().split()}


def test_a_workflow_runs_again_when_its_file_changes_and_waits_while_it_is_broken(
    watching: Watching, plugin: Path
) -> None:
    code = plugin.read_text()
    (first,) = watching.until_waiting(1)
    engine = {
        pid for pid in children_of(watching.process.pid) if b"debug.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }
    assert len(engine) == 1
    assert first["failure"] is None and first["workflow"] == "history_agent" and first["seconds"] > 0
    assert [one["rollout"] for one in first["experiences"]] == [0, 1]
    for one in first["experiences"]:
        assert len(one["logprobs"]) == len(one["mask"]) == one["response_tokens"] and max(one["logprobs"]) <= 0
        assert len(one["token_ids"]) == one["prompt_tokens"] + one["response_tokens"] and "1+1=" in one["prompt"]
    plugin.write_text(code + "\ndef broken(:\n")
    assert len(watching.until_waiting(2)) == 1
    assert re.search(r"agent\.py:\d+: SyntaxError", watching.said)
    plugin.write_text(code.replace("experience.reward = reward", "experience.reward = reward + 7.5"))
    assert min(one["reward"] for one in watching.until_waiting(3)[1]["experiences"]) >= 7.5
    plugin.write_text(code.replace("return experiences", "raise ValueError('not today')"))
    failed = watching.until_waiting(4)[2]
    assert failed["failure"]["cause"] == "workflow_error" and "not today" in failed["failure"]["error"]
    assert engine <= children_of(watching.process.pid), "the engine is the one that was started"
    watching.process.send_signal(signal.SIGINT)
    assert watching.process.wait(60) == 128 + signal.SIGINT
    assert not any(Path(f"/proc/{pid}").exists() for pid in engine)
