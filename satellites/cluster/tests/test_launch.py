"""`trinity launch slurm`: the script's text, and what is refused. tests/e2e/test_slurm.py runs it on a real Slurm."""

import os
import re
import shlex
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from trinity.cli.main import app

pytestmark = pytest.mark.core

ODD = 'it\'s $(touch hacked) `touch hacked`; "$HOME" \\ #'


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("TRINITY_")]:
        monkeypatch.delenv(name)
    taskset = {
        "path": str(tmp_path),
        "format": {"prompt_key": "q", "response_key": "a"},
        "default_workflow_type": "simple_workflow",
        "default_reward_fn_type": "accuracy_reward",
    }
    values = {
        "project": "tests",
        "name": "odd $(touch hacked) 'name'",
        "checkpoint_root_dir": str(tmp_path / "jobs"),
        "model": {"model_path": "m", "max_prompt_tokens": 8, "max_response_tokens": 8},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
        "buffer": {"batch_size": 2, "total_steps": 2, "explorer_input": {"taskset": taskset}},
    }
    path = tmp_path / "run $(touch hacked).yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def launch(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["launch", "slurm", "--config", str(config), *arguments])


def script(config: Path, *arguments: str) -> str:
    done = launch(config, "--dry-run", *arguments)
    assert done.exit_code == 0, done.output
    return done.output


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_the_options_of_all_nodes_are_in_the_script_and_those_of_explorers_are_not(config: Path) -> None:
    text = script(
        config, "--nodes", "3", "--partition", "gpu,long", "--account", "rl", "--time", "1-12:00:00", "--gpus-per-node",
        "a100:4", "--cpus-per-task", "16", "--sbatch", "qos=high", "--sbatch", "constraint=[a|b]&c", "--sbatch",
        "--exclusive", "--explorer-sbatch", "partition=preempt",
    )  # fmt: skip
    found = directives(text)
    assert found[-8:] == [
        "--partition=gpu,long", "--account=rl", "--time=1-12:00:00", "--gpus-per-node=a100:4", "--cpus-per-task=16",
        "--qos=high", '--constraint="[a|b]&c"', "--exclusive",
    ]  # fmt: skip
    assert {"--requeue", '--signal="B:TERM@60"', "--nodes=1", "--open-mode=append"} <= {*found}
    commands = [shlex.split(line[1:]) for line in text.splitlines() if line.startswith("#   sbatch")]
    assert [command[0] for command in commands] == ["sbatch", "sbatch"]
    assert {"--array=1-2", "--dependency=after:ID", "--kill-on-invalid-dep=yes"} <= {*commands[1]}
    assert commands[1][-2:] == ["--partition=preempt", commands[0][-1]]


def test_one_node_needs_neither_explorers_nor_another_mode(config: Path) -> None:
    text = script(config)
    assert text.count("#   sbatch") == 1
    assert "mode=train " not in text and "mode=train\n" not in text
    assert "scancel" not in text
    refused = launch(config, "--explorer-sbatch", "qos=low", "--dry-run")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "--nodes 2 or more" in refused.stderr


def test_machines_of_the_trainer_are_an_array_of_their_own(config: Path) -> None:
    text = script(config, "--nodes", "5", "--trainer-nodes", "2", "--explorer-sbatch", "qos=low")
    commands = [shlex.split(line[1:]) for line in text.splitlines() if line.startswith("#   sbatch")]
    arrays = [next(option for option in command if "--array" in option) for command in commands[1:]]
    assert arrays == ["--array=1-1", "--array=1-3"]
    assert "--qos=low" not in commands[1] and "--qos=low" in commands[2]
    assert "cluster.node_num=2" in text and "-trainers,trinity-" in text
    assert 'own=(mode=train_node cluster.node_name="$name")' in text
    for given, said in (
        (("--trainer-nodes", "3"), "3 train (--trainer-nodes)"),
        (("--", "cluster.node_num=4"), "4 train"),
    ):
        refused = launch(config, "--nodes", "2", "--dry-run", *given)
        assert (refused.exit_code, said in refused.stderr) == (2, True), refused.stderr
    whole = script(config, "--nodes", "2", "--trainer-nodes", "2")
    assert whole.count("#   sbatch") == 2 and "mode=train &" not in whole


def test_the_shell_runs_no_part_of_a_name_and_each_argument_arrives_as_it_was(config: Path, tmp_path: Path) -> None:
    """The script of a node whose commands only write down how they were called."""
    plugins = tmp_path / "plug ins"
    plugins.mkdir()
    (plugins / "of_launch.py").write_text(
        "from trinity.plugins import reward_function\n\n\n@reward_function('of_launch')\ndef reward(item, args): ...\n"
    )
    text = script(config, "--nodes", "2", "--plugin-dir", str(plugins), "--", f"explorer.env_vars.X={yaml_text(ODD)}")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    job = tmp_path / "jobs/tests/odd $(touch hacked) 'name'"
    run = ["run", "--config", str(config), f"--plugin-dir={plugins}", f"explorer.env_vars.X={yaml_text(ODD)}"]
    run.append(f'checkpoint_root_dir="{tmp_path / "jobs"}"')
    hosts = ["--host", "10.0.0.7", "--host", "localhost", "--host", "127.0.0.1"]
    certify = ["", "certs", "rotate", "--folder", f"{job}/slurm/identity", *hosts]

    servers = ["buffer", "environment", "explorer", "sync", "trainer", "nats"]
    assert played(text, tmp_path) == [[*certify, *servers], [f"{job}/slurm/identity", *run, "mode=train"]]
    own = [f"{job}/slurm/identity/explorer-1", *run, "mode=explore", "explorer.name=explorer-1"]
    own.append("synchronizer.sync_timeout=3000000")
    assert played(text, tmp_path, SLURM_ARRAY_TASK_ID="1") == [[*certify, "explorer-1"], own]
    assert not list(tmp_path.glob("hacked"))


def test_machines_of_the_trainer_and_explorers_run_the_commands_of_the_docs(config: Path, tmp_path: Path) -> None:
    text = script(config, "--nodes", "4", "--trainer-nodes", "2")
    submitted = [shlex.split(line[1:]) for line in text.splitlines() if line.startswith("#   sbatch")]
    arrays = [option for command in submitted for option in command if option.startswith("--job-name=")]
    (own,) = [line for line in directives(text) if line.startswith("--job-name=")]
    jobs = [option.removeprefix("--job-name=") for option in (own, *arrays)]
    documented = (Path(__file__).parents[3] / "docs/modes.md").read_text()
    keys = re.findall(r"trinity run --config run\.yaml (mode=(?:train|train_node|explore)\b.*)", documented)
    assert len({mode.split()[0] for mode in keys}) == 3, keys
    places = (("mode=train", ""), ("mode=train_node", "trainer-1"), ("mode=explore", "explorer-1"))
    for job, (mode, name) in zip(jobs, places, strict=True):
        task = "1" if name else ""
        *_, (identity, *command) = played(text, tmp_path, SLURM_JOB_NAME=job, SLURM_ARRAY_TASK_ID=task)
        typed = next(line.replace("gpu-2", name).replace("gpu-3", name) for line in keys if line.split()[0] == mode)
        assert {*typed.split()} <= {*command}, job
        assert "cluster.node_num=2" in command and command.count(mode) == 1
        assert Path(identity).name == (name or "identity")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nodes", "0"], "--nodes: is 0; give 1 to 10000"),
        (["--partition", "a b"], "--partition: is 'a b'; give"),
        (["--account", "$(id)"], "--account: is '$(id)'; give"),
        (["--time", "soon"], "--time: is 'soon'; give minutes"),
        (["--gpus-per-node", "0"], "--gpus-per-node: is '0'; give a number"),
        (["--gres", "gpu 4"], "--gres: is 'gpu 4'; give name:type:number"),
        (["--cpus-per-task", "-1"], "--cpus-per-task: is '-1'; give 1 or more"),
        (["--sbatch", "signal=9"], "--sbatch: is 'signal=9', but the script needs --signal for itself; leave it out"),
        (["--sbatch", "comment=a\nb"], "--sbatch: is 'comment=a\\nb'; give KEY=VALUE"),
        (["--sbatch", 'comment="a"'], "give KEY=VALUE or KEY as sbatch has it, without quotes"),
        (["--sbatch", "A b=c"], "--sbatch: is 'A b=c'; give KEY=VALUE"),
        (["-N", "2", "--explorer-sbatch", "array=1-9"], "--explorer-sbatch: is 'array=1-9', but the script needs"),
        (["mode=serve"], "mode: is 'serve'; launch starts a whole run"),
        (["continue_from_checkpoint=false"], "continue_from_checkpoint: is false, so each job"),
        (["checkpoint_root_dir=jobs/100%"], "checkpoint_root_dir: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_with_field_value_and_fix(config: Path, arguments: list[str], said: str) -> None:
    done = launch(config, "--dry-run", *arguments)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
    assert said in done.stderr


def test_a_run_of_other_identities_is_not_launched(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_NATS_URL", "nats://10.0.0.1:4222")
    done = launch(config, "--dry-run")
    assert (done.exit_code, done.stderr) == (
        2, "trinity: TRINITY_NATS_URL: is set, but launch makes the run's identities and NATS; unset it\n"
    )  # fmt: skip


def test_secrets_are_for_the_owner_alone_and_both_jobs_are_submitted_or_none(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "said"
    programs = tmp_path / "bin"
    programs.mkdir()
    record = f'echo "$(basename "$0") $*" >> {said}'
    write_program(
        programs / "sbatch", f'{record}; case "$*" in *array*) echo no such partition >&2; exit 1;; esac; echo 12'
    )
    write_program(programs / "scancel", record)
    write_program(programs / "squeue", "")
    done = launch_with(programs, config, monkeypatch, "--nodes", "3")
    assert (done.exit_code, done.stderr) == (1, "trinity: sbatch: no such partition\n")
    assert said.read_text().splitlines()[-1] == "scancel 12"
    write_program(programs / "sbatch", "echo 12")
    done = launch_with(programs, config, monkeypatch, "--nodes", "3")
    assert done.exit_code == 0, done.output
    folder = tmp_path / "jobs/tests/odd $(touch hacked) 'name'/slurm"
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE((folder / "run.sh").stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    keys = sorted(path.parent.name for path in folder.glob("identity/*/tls.key"))
    assert {"explorer-1", "explorer-2", "nats", "trainer"} <= {*keys}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("identity/**/*.key")} == {0o600}
    write_program(programs / "squeue", "echo 12 RUNNING $(expr \"$*\" : '.*--name=\\([^,]*\\),')")
    done = launch_with(programs, config, monkeypatch, "--nodes", "3")
    assert "the run is in the queue as job 12 (RUNNING); end it by `scancel --name=trinity-tests-" in done.stderr
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "squeue is not on PATH" in launch(config).stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck: `apt-get install shellcheck`")
@pytest.mark.parametrize("nodes", ["1", "3"])
def test_shellcheck_finds_nothing(config: Path, nodes: str) -> None:
    text = script(config, "--nodes", nodes)
    checked = subprocess.run(["shellcheck", "--exclude=SC2016", "-"], input=text, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def launch_with(programs: Path, config: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return launch(config, *arguments)


def played(text: str, folder: Path, **environment: str) -> list[list[str]]:
    """Runs a node's script whose commands only record their calls. Returns identity and arguments of each."""
    said, programs = folder / "said", folder / "bin"
    said.unlink(missing_ok=True)
    programs.mkdir(exist_ok=True)
    for name, answer in (("scontrol", "echo ' NodeAddr=10.0.0.7 Restarts=0 '"), ("squeue", "echo 12"), ("scancel", "")):
        write_program(programs / name, answer)
    recorder = write_program(
        programs / "trinity", f'printf "%s\\0" "${{TRINITY_IDENTITY:-}}" "$@" >> {said}; echo >> {said}'
    )
    text = "\n".join(f"trinity=({recorder})" if line.startswith("trinity=(") else line for line in text.splitlines())
    given = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "12", **environment}
    assert subprocess.run(["bash"], input=text, text=True, env=given, timeout=60, check=False).returncode == 0
    return [call.split("\0")[:-1] for call in said.read_text().split("\n")[:-1]]


def write_program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o700)
    return path


def yaml_text(text: str) -> str:
    """A text as a value in an override."""
    return "'" + text.replace("'", "''") + "'"
