"""The parts of benchmarks/faults for TRL with a vLLM server that need no GPU: commands, GPUs and restarts."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "benchmarks/faults"
SYSTEMS = FAULTS / "systems"

pytestmark = [pytest.mark.extended, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FAULTS))


TRLS_OWN = """
import json, sys
from trinity.runtime.torch_builds import hide_unusable_companions
hide_unusable_companions()
from trl import GRPOConfig, TrlParser
from trl.scripts.vllm_serve import ScriptArguments, build_command
options = json.loads(sys.argv[1])
arguments = TrlParser(ScriptArguments).parse_args_and_config(options)[0]
config = GRPOConfig(use_vllm=True, vllm_mode="server", vllm_server_base_url=sys.argv[2], use_cpu=True, bf16=False)
print("\\n" + json.dumps([build_command(arguments), config.vllm_mode, config.vllm_server_base_url]))
"""


def test_the_server_is_started_as_trl_starts_it_and_each_part_has_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL comes from the package index, into a folder that only its processes import from."""
    from systems.base import Settings
    from systems.trl_server import URL, TrlServer

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    settings = Settings(tmp_path / "model", tmp_path, 8, 4, 3, tokens=24, save_every=5, seed=1, gpu=True)
    TrlServer().prepare(settings, tmp_path)
    pair = json.loads((tmp_path / "pair.json").read_text())
    assert [(name, part["variables"]["CUDA_VISIBLE_DEVICES"]) for name, part in pair.items()] == [
        ("server", "4"),
        ("trainer", "6"),
    ]
    assert {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": "127.0.0.1"}.items() <= pair["server"]["variables"].items()
    assert pair["trainer"]["command"][-3:] == ["--gpu", "--server", URL]
    assert TrlServer().command(settings, tmp_path)[1:] == [str(SYSTEMS / "trl_pair.py"), str(tmp_path / "pair.json")]

    host, port = URL.removeprefix("http://").split(":")
    options = ["--model", str(settings.model), "--host", host, "--port", port, "--gpu_memory_utilization", "0.3",
               "--enforce_eager"]  # fmt: skip
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(TrlServer().paths()[1:])}
    done = subprocess.run(
        [sys.executable, "-c", TRLS_OWN, json.dumps(options), URL],
        env=variables, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    trls, mode, url = json.loads(done.stdout.splitlines()[-1])
    assert (mode, url) == ("server", URL)
    ours = options_of(pair["server"]["command"])
    trls = {name: value for name, value in options_of(trls).items() if name != "--enable-scale-out"}  # of a later vLLM
    assert ours.items() <= trls.items()
    unsaid = {"--tensor-parallel-size": "1", "--data-parallel-size": "1", "--dtype": "auto", "--kv-cache-dtype": "auto",
              "--model-impl": "vllm", "--uvicorn-log-level": "info"}  # fmt: skip
    assert {name: value for name, value in trls.items() if name not in ours} == unsaid


def options_of(command: list[str]) -> dict[str, str]:
    """Returns the options of a command with their values; also its program and model."""
    found, name = {"": " ".join(command[:5])}, ""
    for word in command[5:]:
        if word.startswith("--"):
            name = word
            found[name] = ""
        else:
            found[name] = word
    return found


@pytest.mark.parametrize(("gpus", "gpu"), [("3", True), ("3,4", False)])
def test_one_gpu_is_too_few(gpus: str, gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from systems.base import Settings
    from systems.trl_server import TrlServer

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    settings = Settings(tmp_path, tmp_path, 8, 4, 3, tokens=24, save_every=5, seed=1, gpu=gpu)
    with pytest.raises(SystemExit, match="two GPUs"):
        TrlServer().prepare(settings, tmp_path)


PART = """
import os, pathlib, subprocess, sys, time
name = sys.argv[1]
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open(name, "a") as file:
    print(os.getpid(), left.pid, file=file)
while not pathlib.Path("end").exists():
    time.sleep(0.05)
sys.exit(3 if name == "trainer" else 1)
"""


def test_each_part_that_dies_is_started_again_alone(tmp_path: Path) -> None:
    parts: dict[str, Any] = {
        name: {"command": [sys.executable, "-c", PART, name], "variables": {}} for name in ("server", "trainer")
    }
    (tmp_path / "pair.json").write_text(json.dumps(parts))
    command = [sys.executable, str(SYSTEMS / "trl_pair.py"), "pair.json"]

    def starts(name: str, count: int) -> list[list[int]]:
        """Returns the ids of each start and of the process that it leaves behind."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            lines = (tmp_path / name).read_text().splitlines() if (tmp_path / name).exists() else []
            if len(lines) >= count:
                return [[int(pid) for pid in line.split()] for line in lines]
            time.sleep(0.05)
        raise TimeoutError(f"{name} was not started {count} times")

    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as pair:
        try:
            starts("trainer", 1)
            time.sleep(1)  # the pair has seen the processes of its parts
            os.kill(starts("server", 1)[0][0], signal.SIGKILL)
            starts("server", 2)
            assert len(starts("trainer", 1)) == 1
            time.sleep(1)
            os.kill(starts("trainer", 1)[0][0], signal.SIGKILL)
            starts("trainer", 2)
            (tmp_path / "end").touch()
            assert pair.wait(30) == 3, "the trainer's own exit code ends both"
        finally:
            pair.kill()
    began = starts("server", 2) + starts("trainer", 2)
    assert not any(psutil.pid_exists(pid) for pids in began for pid in pids)


def test_what_samples_is_killed(tmp_path: Path) -> None:
    from cases import CASES, Run

    with subprocess.Popen(["sleep", "600"]) as engine:
        found = psutil.Process(engine.pid)
        run = Run(found, lambda: 0, lambda root: root, None, tmp_path, 0, lambda: None, lambda what: found)  # type: ignore[arg-type]
        strike = next(case for case in CASES if case.name == "kill-engine").strike
        assert strike
        strike(run)
        assert engine.wait(10) == -signal.SIGKILL
