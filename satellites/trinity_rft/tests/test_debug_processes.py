"""The processes of `trinity debug`, with a program in place of the engine's: they answer, restart, end, and say why."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fakes.data.experience import make_task
from trinity.compat_rft.debug.workbench import Workbench
from trinity.config.load import parse
from trinity.reading.errors import RunError

pytestmark = pytest.mark.core

YAML = """
name: fresh
model: {model_path: m, max_prompt_tokens: 8, max_response_tokens: 8}
buffer: {batch_size: 2, explorer_input: {taskset: {name: sums, path: d}}}
"""
ENGINE = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("task", {}).get("task_id") == "dies":
        sys.exit("no memory is left")
    print(json.dumps({"problem": ""} if "reload" in asked else {"seconds": 1.0, "failure": None}), flush=True)
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Workbench]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = Workbench(parse(YAML))
    made._engine.command = [sys.executable, "-c", ENGINE]
    yield made
    made.close()


def test_a_reload_restarts_the_environment_service_and_not_the_engine(bench: Workbench, tmp_path: Path) -> None:
    bench.start()
    engine, environment = bench._engine.pid, bench._environment.pid
    assert bench.run(make_task())["seconds"] == 1.0
    assert bench.reload() == ""
    assert bench._engine.pid == engine and bench._environment.pid != environment
    assert bench.run(make_task())["failure"] is None
    bench.close()
    assert not bench._engine.is_running() and not bench._environment.is_running()
    assert list(tmp_path.iterdir()) == [], "nothing is left of the temporary folder"


def test_an_engine_that_ends_says_why_and_its_log_stays(bench: Workbench, tmp_path: Path) -> None:
    bench.start()
    with pytest.raises(RunError, match="debug ended: no memory is left; its log is in"):
        bench.run(make_task(task_id="dies"))
    bench.close()
    (folder,) = tmp_path.iterdir()
    assert "no memory is left" in (folder / "log" / "debug.out").read_text()


COMMAND = """
import sys
from trinity.compat_rft.debug import debug, workbench
from trinity.cli.main import app
from trinity.cli.supervise.checks import preflight

preflight.hub_problem = lambda name: ""

class Bench(workbench.Workbench):
    def start(self):
        self._engine.command = [sys.executable, "-c", "import sys; print('{}', flush=True); sys.stdin.read()"]
        super().start()
        print("started", self._engine.pid, self._environment.pid, file=sys.stderr, flush=True)

debug.Workbench = Bench
sys.argv[0] = "trinity"
app()
"""


def test_sigterm_ends_its_processes_and_removes_the_folder(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1", "response": "2"}) + "\n")
    file, temporary = tmp_path / "run.yaml", tmp_path / "temporary"
    temporary.mkdir()
    file.write_text(YAML.replace("model_path: m", "model_path: o/m").replace("path: d", f"path: {tmp_path}/rows.jsonl"))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", COMMAND, "debug", "--config", str(file), "--prompt", "1+1"]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
    text, deadline = "", time.monotonic() + 60
    while "started" not in text:
        text = (tmp_path / "said").read_text()
        assert process.poll() is None and time.monotonic() < deadline, text
        time.sleep(0.1)
    pids = [int(pid) for pid in text.partition("started")[2].split()[:2]]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM, (tmp_path / "said").read_text()
    assert "ended by SIGTERM" in (tmp_path / "said").read_text()
    assert list(temporary.glob("trinity-debug-*")) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
