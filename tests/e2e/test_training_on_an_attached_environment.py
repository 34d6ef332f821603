"""examples/custom_environment/guess.yaml: a JavaScript program attaches to the run, is lost once, and is trained on.

Processes are forked, and transformers samples where vLLM would (support/programs/forked_run.py).
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.programs.forked_run import ForkedRun
from support.programs.run import write_config
from trinity.runtime.process import free_port

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 3
TOKEN = "example"


class Attached:
    """A program that attaches."""

    def __init__(self, folder: Path, *command: str, **environment: str) -> None:
        self.output = folder / f"{Path(command[-4]).name}.out"
        with self.output.open("wb") as out:
            given = {**os.environ, "TRINITY_ENVIRONMENT_ATTACH_TOKEN": TOKEN, **environment}
            self.process = subprocess.Popen(command, env=given, stdout=out, stderr=out)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def example(repository: Path, tmp_path: Path) -> Path:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path / "custom_environment"
    shutil.copytree(repository / "examples/custom_environment", folder)
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=120)
    if done.returncode and not os.environ.get("CI"):
        pytest.skip(f"npm cannot install @grpc/grpc-js: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def run(example: Path, quickstart_model: Path, tmp_path: Path) -> Iterator[ForkedRun]:
    small = {
        "model": {"model_path": str(quickstart_model), "max_model_len": 512, "max_response_tokens": 12},
        "algorithm": {"repeat_times": 2},
        "buffer": {
            "batch_size": 4,
            "total_steps": STEPS,
            "explorer_input": {"taskset": {"path": str(example / "data"), "workflow_args": {"max_turns": 2}}},
        },
    }
    config = write_config(example / "guess.yaml", tmp_path / "guess.yaml", small)
    address = f"127.0.0.1:{free_port()}"
    started = ForkedRun(config, tmp_path, TRINITY_ENVIRONMENT_ATTACH_TOKEN=TOKEN, TRINITY_ENVIRONMENT_LISTEN=address)
    yield started
    started.end()


def test_javascript_attaches_to_a_run_and_python_takes_over(
    run: ForkedRun, example: Path, repository: Path, tmp_path: Path
) -> None:
    address = run.environment["TRINITY_ENVIRONMENT_LISTEN"]
    run.start()
    protos = str(repository / "proto")
    first = Attached(tmp_path, "node", str(example / "guess.js"), "attach", address, "js", TRINITY_PROTOS=protos)
    second = None
    try:
        run.until(lambda status: (status["step"] or 0) >= 1, 200, "the first step")
        assert "attached as js" in first.output.read_text()
        first.end()
        second = Attached(tmp_path, sys.executable, str(example / "guess.py"), "attach", address, "python")
        assert run.finish(150) == 0, run.tail()
    finally:
        first.end()
        if second is not None:
            second.end()
    found: dict[str, float] = {}
    for line in (run.job / "monitor/explorer.jsonl").read_text().splitlines():
        found |= json.loads(line)
    assert found["rollout/guesses_left/mean"] == 3, "five guesses, and two turns"
    trained = [json.loads(line)["step"] for line in (run.job / "monitor/trainer.jsonl").read_text().splitlines()]
    assert trained == list(range(1, STEPS + 1))
