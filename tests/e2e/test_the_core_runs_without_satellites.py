"""A fresh environment without satellites, except environments, learns, and says what it misses.

Third-party packages are links to the installed ones; parts of Trinity are installed from their wheels.
"""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

SATELLITES = (
    "archive", "cluster", "conformance", "convert", "deep_check", "import_verl", "inspect", "lineage", "modes",
    "own_data", "study", "task_pipeline", "tinker", "trackers", "traffic", "trinity_rft", "ui",
)  # fmt: skip
SHORT = [
    "stages.0.buffer.total_steps=4",
    "buffer.total_steps=2",
    "buffer.batch_size=4",
    "buffer.explorer_input.eval_tasksets=[]",
    "trainer.save_interval=1",
]


@pytest.fixture(scope="module")
def core(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, quickstart_model: Path, quickstart_data: Path
) -> SimpleNamespace:
    """The environment: `trinity(*arguments)` calls the command there."""
    folder = tmp_path_factory.mktemp("core")
    home, wheels, third = folder / "home", folder / "wheels", folder / "third"
    third.mkdir()
    for path in (path for site in reversed(sys.path) if "site-packages" in site for path in Path(site).iterdir()):
        if not path.name.startswith(("trinity-", "_trinity")) and path.suffix != ".pth":
            (third / path.name).unlink(missing_ok=True)
            (third / path.name).symlink_to(path)
    venv.create(home)
    parts = [path.parent for path in sorted(repository.glob("*/**/pyproject.toml")) if ".venv" not in path.parts]
    core = [str(part) for part in parts if part.name not in SATELLITES or part.parent.name != "satellites"]
    assert len(core) == len(parts) - len(SATELLITES)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels), *core]
    subprocess.run(build, check=True, timeout=300, cwd=folder)
    python = home / "bin/python"
    install = [*pip, "--python", str(python), "install", "-q", "--no-deps", "--no-compile", *map(str, wheels.iterdir())]
    subprocess.run(install, check=True, timeout=200, cwd=folder)
    (site,) = home.glob("lib/python3*/site-packages")
    (site / "third.pth").write_text(f"{third}\n")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "PATH": f"{home / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TRINITY_CHECKPOINT_ROOT_DIR": str(folder / "jobs"),
        "TRINITY_MODEL_PATH": str(quickstart_model),
        "TRINITY_TASKSET_PATH": str(quickstart_data),
    }

    def trinity(*arguments: str, seconds: float = 60) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(home / "bin/trinity"), *arguments],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
        )

    yaml = str(repository / "examples/quickstart/arithmetic.yaml")
    return SimpleNamespace(folder=folder, trinity=trinity, yaml=yaml)


def test_the_quickstart_is_checked_and_learns(core: SimpleNamespace) -> None:
    checked = core.trinity("check", "--config", core.yaml, *SHORT)
    assert checked.returncode == 0, checked.stderr
    done = core.trinity("run", "--config", core.yaml, *SHORT, seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((core.folder / "jobs/quickstart/arithmetic/summary.json").read_text())
    assert [part["stage"] for part in summary["stages"]] == ["sft", "rft"]


@pytest.mark.parametrize(
    ("command", "distribution"),
    [
        ("ui", "trinity-ui"),
        ("export", "trinity-ui"),
        ("fork", "trinity-lineage"),
        ("verify", "trinity-lineage"),
        ("debug", "trinity-compat-rft"),
        ("import-verl", "trinity-import-verl"),
        ("convert", "trinity-convert"),
        ("certs", "trinity-cluster"),
        ("launch", "trinity-cluster"),
        ("serve", "trinity-modes"),
        ("log", "trinity-inspect"),
        ("env", "trinity-inspect"),
        ("deadletters", "trinity-inspect"),
        ("init", "trinity-own-data"),
        ("tinker", "trinity-tinker"),
    ],
)
def test_a_command_names_its_distribution(core: SimpleNamespace, command: str, distribution: str) -> None:
    done = core.trinity(command)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and f"{distribution}, which is not installed" in done.stderr


def test_a_key_of_trinity_rft_names_its_distribution(core: SimpleNamespace) -> None:
    done = core.trinity("check", "--config", core.yaml, "explorer.runner_num=4")
    assert done.returncode == 2
    assert "explorer.runner_num: unknown key; did you mean " in done.stderr
    assert "keys of Trinity-RFT need trinity-compat-rft, which is not installed" in done.stderr


def test_a_workflow_of_trinity_rft_names_its_distribution(core: SimpleNamespace) -> None:
    name = "R3L_sokoban_workflow"
    done = core.trinity("check", "--config", core.yaml, f"buffer.explorer_input.default_workflow_type={name}")
    assert done.returncode == 2
    assert f"{name!r}, which is in trinity-compat-rft, which is not installed" in done.stderr


def test_a_task_pipeline_names_its_distribution(core: SimpleNamespace) -> None:
    for command in ("check", "run"):
        done = core.trinity(command, "--config", core.yaml, "data_processor.task_pipeline={top_k: 8}")
        assert done.returncode == 2, done.stdout + done.stderr
        assert "data_processor.task_pipeline: needs trinity-task-pipeline, which is not installed" in done.stderr


def test_a_run_without_a_yaml_names_its_distribution(core: SimpleNamespace) -> None:
    done = core.trinity("check", "--model", "m", "--data", "d.jsonl")
    assert done.returncode == 2 and "trinity-own-data, which is not installed" in done.stderr


def test_a_deep_check_names_the_distribution_of_its_trials(core: SimpleNamespace) -> None:
    done = core.trinity("check", "--deep", "--config", core.yaml)
    assert "are not tried: that is in trinity-deep-check, which is not installed" in done.stdout, done.stderr


def test_a_tracker_names_its_distribution(core: SimpleNamespace) -> None:
    done = core.trinity("check", "--deep", "--config", core.yaml, "monitor.monitor_type=wandb")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "monitor.monitor_type: is 'wandb', which is in trinity-trackers, which is not installed" in done.stderr


def test_live_traffic_names_its_distribution(core: SimpleNamespace) -> None:
    done = core.trinity("check", "--config", core.yaml, "explorer.traffic={}", "explorer.record=true")
    assert done.returncode == 2 and "explorer.traffic: needs trinity-traffic, which is not installed" in done.stderr


@pytest.mark.parametrize("mode", ["explore", "train_node", "serve", "bench"])
def test_a_mode_names_its_distribution(core: SimpleNamespace, mode: str) -> None:
    done = core.trinity("run", "--config", core.yaml, f"mode={mode}")
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"mode: is '{mode}', which is in trinity-modes, which is not installed" in done.stderr


def test_an_archive_names_its_distribution(core: SimpleNamespace) -> None:
    done = core.trinity("check", "--config", core.yaml, "data_processor.experience_pipeline.input_save_path=kept.jsonl")
    assert done.returncode == 2, done.stdout + done.stderr
    key = "data_processor.experience_pipeline.input_save_path: names an archive, which needs trinity-archive"
    assert f"{key}, which is not installed" in done.stderr


def test_a_plugin_of_trinity_rft_names_its_distribution(core: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "of_another.py").write_text("from trinity.common.workflows import WORKFLOWS\n")
    done = core.trinity("check", "--config", core.yaml, "--plugin-dir", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"trinity: {tmp_path / 'of_another.py'}:1: ")
    assert done.stderr.endswith("names of Trinity-RFT are in trinity-compat-rft, which is not installed\n")
