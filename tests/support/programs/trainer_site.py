"""A trainer on several machines, and its accidents: network namespaces, certificates, a separate NATS.

The machines share a file system, and start by the commands of docs/modes.md.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors.numpy import load_file

from support.programs.forked_run import ForkedRun
from support.programs.run import TrinityRun
from support.servers.machines import Command, Machines
from trinity.inspect.cost import render
from trinity.reading.accounts.fates import Groups
from trinity.reading.nats import find_binary
from trinity.study.cost import account, measure

MODES = Path(__file__).parents[3] / "docs/modes.md"
START = 400.0  # seconds for a group to form, on a machine with other work
SUMS = {"prompt_key": "question", "response_key": "answer"}


@dataclass
class Site:
    """Machines with identities and a NATS on the first of them."""

    machines: Machines
    folder: Path
    config: Path

    @property
    def identity(self) -> Path:
        return self.folder / "identity"

    @property
    def job(self) -> Path:
        values = yaml.safe_load(self.config.read_text())
        return self.folder / "jobs" / values["project"] / values["name"]

    def prepare(self, trainers: int = 0) -> None:
        """Makes identities, and starts NATS. The machines after so many trainers are explorers; 0: none is."""
        first = self.machines.hosts[0]
        self._certs("init", "--host", first)
        for index, host in enumerate(self.machines.hosts[1:], 2):
            role = "explorer" if 0 < trainers < index else "trainer"
            self._certs("issue", role, "--name", f"gpu-{index}", "--host", host)
        self._certs("issue", "explorer", "--name", "gpu-9", "--host", self.machines.own)
        text = (Path(__file__).parents[3] / "deploy/nats/nats.conf").read_text()
        text = text.replace("/etc/nats/identity", f"{self.identity}/nats").replace("/data/nats", f"{self.folder}/nats")
        conf = self.folder / "nats.conf"
        conf.write_text(text.replace("identity/accounts", "identity/nats/accounts").replace("64GB", "8GB"))
        self.machines.start(0, ["-c", str(conf)], os.environ, self.folder / "nats.out", program=str(find_binary()))

    def _certs(self, *arguments: str) -> None:
        own = ["--folder", str(self.identity), "--config", str(self.config)]
        command = [sys.executable, "-m", "trinity.cli.main", "certs", *arguments, *own]
        subprocess.run(command, check=True, capture_output=True, env=self._environment("identity", 0))

    def _environment(self, identity: str, index: int) -> dict[str, str]:
        hosts = [*self.machines.hosts, self.machines.own]
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TRINITY_BUFFER_LOG_GIB": "0.25",
            "TRINITY_CHECKPOINT_ROOT_DIR": str(self.folder / "jobs"),
            **({"TRINITY_IDENTITY": str(self.folder / identity)} if (self.folder / identity).is_dir() else {}),
            "TRINITY_NATS_URL": f"nats://{self.machines.hosts[0]}:4222",
            "TRINITY_HOST": hosts[index],
            **({"TRINITY_PLUGIN_DIRS": str(plugins)} if (plugins := self.folder / "plugins").is_dir() else {}),
        }

    def first(self, *overrides: str) -> Command:
        arguments = [*self._typed("train"), *overrides]
        return self.machines.start(0, arguments, self._environment("identity", 0), self.folder / "first.out")

    def further(self, number: int, *overrides: str) -> Command:
        name = f"gpu-{number}"
        environment = self._environment(f"identity/{name}", number - 1)
        arguments = [*self._typed("train_node", name), *overrides]
        return self.machines.start(number - 1, arguments, environment, self.folder / f"{name}.out")

    def explores(self, number: int) -> Command:
        """Starts an explorer with vLLM on a machine."""
        name = f"gpu-{number}"
        environment = {**self._environment(f"identity/{name}", number - 1), "TRINITY_LOG_LEVEL": "DEBUG"}
        return self.machines.start(number - 1, self._typed("explore", name), environment, self.folder / f"{name}.out")

    def explorer(self) -> ForkedRun:
        """Starts an explorer with transformers on the machine of this process."""
        run = ForkedRun(self.config, self.folder, **self._environment("identity/gpu-9", len(self.machines.hosts)))
        run.start(*self._typed("explore", "gpu-9")[3:])
        return run

    def _typed(self, mode: str, name: str = "") -> list[str]:
        """Arguments of the command of docs/modes.md for this mode, with this test's YAML and name of the machine."""
        section = MODES.read_text().partition("## A trainer on several machines")[2].replace("\\\n", "")
        (command,) = [line for line in section.splitlines() if f" mode={mode} " in f"{line} "]
        variables, _, arguments = command.partition(".venv/bin/trinity ")
        given = {one.partition("=")[0] for one in variables.split()}
        assert (
            given == {"TRINITY_IDENTITY", "TRINITY_NATS_URL", "TRINITY_HOST"} <= self._environment("identity", 0).keys()
        )
        return [re.sub("gpu-[23]", name, one).replace("run.yaml", str(self.config)) for one in shlex.split(arguments)]

    def step(self) -> int:
        return max((line["step"] for line in self.batches()), default=0)

    def batches(self) -> list[dict[str, Any]]:
        file = self.job / "monitor/batches.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def until_step(self, step: int, *commands: Command, ranks: int = 0) -> None:
        """Waits for a step; with `ranks` for one that so many ranks have trained."""
        deadline = time.monotonic() + START
        since = len(self.batches())
        while not any(line["step"] >= step and ranks in (0, line["ranks"]) for line in self.batches()[since:]):
            for command in commands:
                assert command.process.poll() is None, command.text[-4000:]
            assert time.monotonic() < deadline, self.said(*commands)
            time.sleep(0.2)

    def said(self, *commands: Command) -> str:
        log = (self.job / "log/trainer.log").read_text()[-2000:] if (self.job / "log/trainer.log").exists() else ""
        return "\n----\n".join([*(command.text[-2000:] for command in commands), log])

    def weights(self, step: int) -> dict[str, Any]:
        return load_file(self.job / f"global_step_{step}/actor/huggingface/model.safetensors")


def sft(model: Path, data: Path, **changes: Any) -> dict[str, Any]:
    return {
        "project": "machines",
        "name": "sft",
        "mode": "train",
        "checkpoint_root_dir": "${oc.env:TRINITY_CHECKPOINT_ROOT_DIR}",
        "model": {"model_path": str(model), "max_prompt_tokens": 32, "max_response_tokens": 32},
        "cluster": {"node_num": 2, "node_timeout": 10},
        "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 2e-5}},
        "buffer": {
            "train_batch_size": 32,
            "total_steps": 12,
            "trainer_input": {
                "experience_buffer": {
                    "name": "sums",
                    "storage_type": "file",
                    "path": str(data),
                    "split": "train",
                    "format": {"prompt_type": "plaintext", **SUMS},
                }
            },
        },
        "trainer": {"gradient_checkpointing": False, "deepspeed": {"zero_stage": 0}, "save_interval": 50},
        **changes,
    }


def rft(model: Path, data: Path, steps: int, nodes: int) -> dict[str, Any]:
    taskset = {"name": "sums", "path": str(data), "split": "train", "format": SUMS}
    return {
        "project": "machines",
        "name": "rft",
        "checkpoint_root_dir": "${oc.env:TRINITY_CHECKPOINT_ROOT_DIR}",
        "model": {"model_path": str(model), "max_prompt_tokens": 32, "max_response_tokens": 16},
        "cluster": {"node_num": nodes, "least_nodes": 1, "node_wait": 8, "node_timeout": 8},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, "kl_loss_fn": "none", "optimizer": {"lr": 1e-4}},
        "buffer": {
            "batch_size": 4,
            "total_steps": steps,
            "explorer_input": {
                "taskset": {
                    **taskset,
                    "default_workflow_type": "simple_workflow",
                    "default_reward_fn_type": "accuracy_reward",
                }
            },
        },
        "explorer": {"runner_per_model": 4},
        "synchronizer": {"sync_interval": 1, "sync_offset": 1},
        "trainer": {"gradient_checkpointing": False, "deepspeed": {"zero_stage": 0}, "save_interval": 3},
    }


def alone(folder: Path, values: dict[str, Any], step: int) -> dict[str, Any]:
    """Weights of one machine's run."""
    folder.mkdir(exist_ok=True)
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    run = TrinityRun(config, folder, OMP_NUM_THREADS="1")
    run.start()
    try:
        assert run.finish(START) == 0, run.tail()
    finally:
        run.end()
    return load_file(run.job / f"global_step_{step}/actor/huggingface/model.safetensors")


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Tensors differ by at most 1e-5, relative to the norm; biases of keys by 1e-4.

    These begin at 0 and hardly change the loss: AdamW scales up gradients that are mostly rounding.
    """
    for name, tensor in expected.items():
        distance = float(((found[name] - tensor) ** 2).sum() ** 0.5)
        limit = 1e-4 if name.endswith("k_proj.bias") else 1e-5
        assert distance <= limit * float((tensor**2).sum() ** 0.5), name


def ranks_of(command: Command) -> list[Any]:
    return command.descendants("trinity.trainer.rank_main")


def a_rank_is_killed(site: Site, first: Command, two: Command) -> Command:
    ranks_of(two)[0].kill()
    first.until("rank 1 of node gpu-2 ended with code -9", 30)
    return first


def a_rank_is_stopped(site: Site, first: Command, two: Command) -> Command:
    ranks_of(two)[0].send_signal(signal.SIGSTOP)
    first.until("rank 1 of node gpu-2 ended with code -9", 60)
    return first


def a_collective_hangs(site: Site, first: Command, two: Command) -> Command:
    (site.folder / "plugins/hang").touch()
    first.until("has stood still for 15 s (cluster.progress_timeout): a rank hangs", 60)
    return first


def a_checkpoint_hangs(site: Site, first: Command, two: Command) -> Command:
    (site.folder / "plugins/hang_in_save").touch()
    first.until("an exchange of 2 ranks has stood still for 15 s (cluster.progress_timeout): a rank hangs", 90)
    return first


def a_machine_is_killed(site: Site, first: Command, two: Command) -> Command:
    two.kill()
    first.until("node gpu-2 is lost", 10)
    site.until_step(site.step(), first, ranks=1)
    site.further(2)
    first.until("node gpu-2 has come", START)
    return first


def a_cable_is_pulled(site: Site, first: Command, two: Command) -> Command:
    site.machines.cut(1)
    first.until("node gpu-2 is lost", 40)
    site.until_step(site.step(), first, ranks=1)
    site.machines.mend(1)
    first.until("node gpu-2 has come", START)
    return first


def a_machine_leaves(site: Site, first: Command, two: Command) -> Command:
    two.process.send_signal(signal.SIGTERM)
    assert two.finish(START) == 128 + signal.SIGTERM, two.text[-2000:]
    first.until("node gpu-2 leaves", 10)
    before = len(site.batches())
    site.until_step(site.step(), first, ranks=1)
    assert site.batches()[before - 1]["step"] < site.batches()[before]["step"], "it saved, and repeats no step"
    site.further(2)
    first.until("node gpu-2 has come", START)
    return first


def the_first_is_killed(site: Site, first: Command, two: Command) -> Command:
    first.kill()
    two.until("the run is gone", 90)
    return site.first()


Accident = Callable[[Site, Command, Command], Command]
ACCIDENTS: list[Accident] = [
    a_machine_leaves, a_rank_is_killed, a_rank_is_stopped, a_collective_hangs, a_checkpoint_hangs, a_machine_is_killed,
    a_cable_is_pulled, the_first_is_killed,
]  # fmt: skip
LOSS = """
import os
import time
from pathlib import Path

from trinity.plugins import policy_loss


def obey(name):
    \"\"\"Rank 1 lives and does nothing more, once there is a file of this name.\"\"\"
    order = Path(__file__).with_name(name)
    if os.environ.get("RANK") == "1" and order.exists():
        order.unlink()
        time.sleep(100_000)


@policy_loss("sft_or_hang", traits=["experts"])
def sft_or_hang(x, share):
    \"\"\"The loss of sft, or a hang in a step, or in the next checkpoint.\"\"\"
    from trinity.trainer.algorithms.policy_losses.sft import sft
    from trinity.trainer.engine.checkpoints import Checkpoints

    obey("hang")
    if not hasattr(Checkpoints, "saves"):
        Checkpoints.saves = Checkpoints.save
        Checkpoints.save = lambda self, step: obey("hang_in_save") or self.saves(step)
    return sft(x, share)
"""
STEPS = 40


def long_sft(model: Path, data: Path, cluster: dict[str, Any]) -> dict[str, Any]:
    values = sft(model, data, cluster=cluster)
    values["buffer"] |= {"train_batch_size": 128, "total_steps": STEPS}
    values["trainer"]["save_interval"] = 4
    return values


def with_accident(accident: Accident, site: Site, model: Path, data: Path, at_step: int = 3) -> str:
    """Plays a run of two machines to its end, with an accident after a step. Returns what `trinity cost` says of it."""
    cluster = {"node_num": 2, "least_nodes": 1, "node_wait": 60, "node_timeout": 8}
    if accident in (a_machine_is_killed, a_cable_is_pulled, a_machine_leaves):
        cluster["node_wait"] = 5
    values = long_sft(model, data, cluster)
    if accident in (a_collective_hangs, a_checkpoint_hangs):
        cluster["progress_timeout"] = 15
        values["algorithm"]["policy_loss_fn"] = "sft_or_hang"
        (site.folder / "plugins").mkdir()
        (site.folder / "plugins/hangs.py").write_text(LOSS)
    site.config.write_text(yaml.safe_dump(values))
    site.prepare()
    first, two = site.first(), site.further(2)
    site.until_step(at_step, first, two, ranks=2)
    began = time.monotonic()
    first = accident(site, first, two)
    site.until_step(site.step(), first, ranks=2)
    print(f"{accident.__name__}: two machines train again {time.monotonic() - began:.0f} s after it")
    assert first.finish(2 * START) == 0, site.said(first, two)
    return render(accident.__name__, account("machines", measure(site.job), Groups(), {}))


def assert_undisturbed(site: Site, undisturbed: dict[str, Any]) -> None:
    """The run has trained each step, and its weights are those of an undisturbed run."""
    assert sorted({line["step"] for line in site.batches()}) == list(range(1, STEPS + 1))
    assert_equal(site.weights(STEPS), undisturbed)


def with_explorer(site: Site, model: Path, data: Path) -> None:
    """Plays a run of three machines and an explorer to its end; the third machine is killed."""
    site.config.write_text(yaml.safe_dump(rft(model, data, STEPS, 3)))
    site.prepare()
    explorer = site.explorer()
    first, two, three = site.first(), site.further(2), site.further(3)
    try:
        site.until_step(2, first, two, three, ranks=3)
        three.kill()
        first.until("node gpu-3 is lost", 10)
        site.until_step(site.step(), first, two, ranks=2)
        assert first.finish(2 * START) == 0, site.said(first, two)
        assert two.finish(60) == 0, site.said(two)
    finally:
        explorer.end()


def assert_groups_once(site: Site, steps: int = STEPS) -> None:
    """All groups that were fed are stored, and each is trained once."""
    summary = json.loads((site.job / "summary.json").read_text())
    assert summary["steps"] == steps
    assert summary["groups_fed"] == summary["groups_stored"] + summary["dead_letters"] + summary["outstanding"]
    assert summary["dead_letters"] == 0
    newest = {line["step"]: line["groups"] for line in site.batches()}
    trained = [group for groups in newest.values() for group in groups]
    assert sorted(newest) == list(range(1, steps + 1))
    assert len(trained) == len(set(trained)) == steps * 4
