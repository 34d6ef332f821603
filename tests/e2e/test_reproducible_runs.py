"""`reproducible: true`: asynchronous runs that are equal, bit for bit, with kills and with another number of explorers.

Real vLLM, DeepSpeed and JetStream. The first run has one explorer and no accident. The second has two, and each of its
processes is killed with -9 once. The third has another seed. Others have several turns, and LoRA. Forks go on from a
step of the first run, and of one that is live. Regrades train its groups with other rewards.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.programs.run import TrinityRun, kill_process, process_of, write_config
from trinity.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS, SHORT, TASKS, GROUP = 30, 4, 6, 4
KILLED = ("explorer", "trainer", "buffer", "sync", "environment", "nats")
REWARD = """
import math

from trinity.plugins import reward_function


@reward_function("spread")
def spread(item, args):
    ids = list(item.token_ids)
    return len(set(ids)) / max(1, len(ids)) + (sum(ids) % 7) / 7


@reward_function("flipped")
def flipped(item, args):
    found = spread(item, args)
    return math.nextafter(found, 2.0) if str(item.truth).endswith("7") else found


@reward_function("even")
def even(item, args):
    return float(sum(item.token_ids) % 2 == 0)
"""


TURNS = """
import zlib

from trinity.plugins import environment
from trinity.sdk.environment import Description, Environment, Observation


@environment("numbers")
class Numbers(Environment):
    description = Description("numbers", deterministic=True)

    def reset(self, task, args, seed):
        self.turn, self.number = 0, seed % 90 + 10
        return Observation(str(self.number))

    def step(self, action):
        self.turn += 1
        self.number = zlib.crc32(f"{self.number}{action}".encode()) % 90 + 10
        return Observation(str(self.number), reward=self.number / 100, done=self.turn == 3)
"""
_RULES = {"environment": "numbers", "max_response_tokens": 8, "on_bad_format": "pass"}
_EPISODES = {"default_workflow_type": "environment_workflow", "workflow_args": _RULES}
_LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
KINDS = {
    "turns": {
        "model": {"max_model_len": 192, "max_prompt_tokens": 96, "max_response_tokens": 96},
        "buffer": {"explorer_input": {"taskset": _EPISODES}},
    },
    "lora": {"model": {"lora_configs": [_LORA]}},
}


def config(name: str, folder: Path, model: Path, steps: int = STEPS) -> dict[str, Any]:
    taskset = {
        "name": "sums", "path": str(folder / "data"), "split": "train",
        "format": {"prompt_key": "question", "response_key": "answer"},
        "default_workflow_type": "simple_workflow", "default_reward_fn_type": "spread",
        "data_selector": {"selector_type": "shuffle", "seed": 1},
    }  # fmt: skip
    return {
        "project": "reproducible",
        "name": name,
        "checkpoint_root_dir": str(folder / "jobs"),
        "reproducible": True,
        "model": {"model_path": str(model), "max_prompt_tokens": 32, "max_response_tokens": 12},
        "algorithm": {"repeat_times": GROUP, "optimizer": {"lr": 1e-3}, "kl_loss_fn": "none"},
        "buffer": {"batch_size": TASKS, "total_steps": steps, "explorer_input": {"taskset": taskset}},
        "explorer": {"runner_per_model": 4, "eval_on_startup": False, "rollout_model": {"seed": 42}},
        "synchronizer": {"sync_offset": 1, "versions_to_keep": STEPS + 1},
        "trainer": {"save_interval": 3, "gradient_checkpointing": False, "max_token_len_per_gpu": 4096},
    }  # fmt: skip


class Runs:
    """Runs of the same folder, data and plugin."""

    def __init__(self, repository: Path, model: Path, folder: Path) -> None:
        self.folder, self.model = folder, model
        self._started: list[TrinityRun] = []
        make = [sys.executable, str(repository / "examples/quickstart/make_data.py"), str(folder / "data")]
        subprocess.run([*make, "--test-size", "32"], check=True, timeout=60, capture_output=True)
        (folder / "plugins").mkdir()
        (folder / "plugins/spread.py").write_text(REWARD)
        (folder / "plugins/numbers_of_turns.py").write_text(TURNS)

    def start(self, name: str, changes: dict[str, Any] | None = None, **given: Any) -> TrinityRun:
        return self._start(f"{name}.yaml", config(name, self.folder, self.model, **given), changes or {})

    def run_fork(self, made: dict[str, Any]) -> TrinityRun:
        """Starts the run that `trinity fork` made."""
        run = TrinityRun(Path(made["config"]), self.folder, TRINITY_PLUGIN_DIRS=str(self.folder / "plugins"))
        self._started.append(run)
        run.start()
        return run

    def join(self, name: str) -> TrinityRun:
        """A second explorer of a run."""
        values = {key: value for key, value in config(name, self.folder, self.model).items() if key != "reproducible"}
        values = {key: values[key] for key in ("project", "name", "checkpoint_root_dir", "model")}
        explorer = {"name": "second", "runner_per_model": 4}
        return self._start(f"{name}-second.yaml", {**values, "mode": "explore", "explorer": explorer})

    def _start(self, file: str, values: dict[str, Any], changes: dict[str, Any] | None = None) -> TrinityRun:
        path = self.folder / file
        path.write_text(yaml.safe_dump(values))
        write_config(path, path, changes or {})
        debug = {"TRINITY_LOG_LEVEL": "DEBUG"}  # for the lines of single groups
        run = TrinityRun(path, self.folder, TRINITY_PLUGIN_DIRS=str(self.folder / "plugins"), **debug)
        self._started.append(run)
        run.start()
        return run

    def end(self) -> None:
        for run in self._started:
            run.end()


@pytest.fixture(scope="module")
def runs(repository: Path, quickstart_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(repository, quickstart_model, tmp_path_factory.mktemp("reproducible"))
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def plain(runs: Runs) -> TrinityRun:
    run = runs.start("plain")
    assert run.finish(400) == 0, run.tail()
    return run


@pytest.fixture(scope="module")
def short(runs: Runs) -> TrinityRun:
    run = runs.start("short", steps=SHORT)
    assert run.finish(400) == 0, run.tail()
    return run


def fork(runs: Runs, parent: TrinityRun, *arguments: str, command: str = "fork") -> dict[str, Any]:
    """Returns the JSON of `trinity fork` or `trinity regrade`. benchmarks/forks.py measures the seconds."""
    given = [sys.executable, "-m", "trinity.cli.main", command, str(parent.job), "--json", *arguments]
    done = subprocess.run(given, capture_output=True, text=True, timeout=60, env=parent.environment)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def own_bytes(folder: Path) -> int:
    """Bytes of files that no other folder has a link to."""
    stats = [path.lstat() for path in folder.rglob("*") if path.is_file()]
    return sum(stat.st_size for stat in stats if stat.st_nlink == 1)


def bisect(one: TrinityRun, other: TrinityRun) -> dict[str, Any]:
    command = [sys.executable, "-m", "trinity.cli.main", "bisect", str(one.job), str(other.job), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1), done.stderr
    return dict(json.loads(done.stdout))


def test_kills_and_another_explorer_change_no_bit(runs: Runs, plain: TrinityRun) -> None:
    run = runs.start("killed")
    status = run.until(lambda s: process_of(s, "trainer")["health"].endswith("SERVING"), 120, "the trainer answers")
    with run.channel(str(process_of(status, "trainer")["address"])) as channel:
        trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
        trainer.Pause(trainer_pb2.PauseRequest(), timeout=120)
        second = runs.join("killed")
        run.until(lambda s: len(s["explorers"]) == 2, 300, "the second explorer")
        trainer.Resume(trainer_pb2.ResumeRequest(), timeout=10)
    for name in KILLED:
        time.sleep(1.0)
        status = run.until(lambda s, name=name: process_of(s, name)["pid"], 60, f"{name} runs")
        assert (status["step"] or 0) < STEPS, f"the run ended before {name} was killed"
        kill_process(status, name)
    assert run.finish(600) == 0, run.tail()
    found = bisect(plain, run)
    assert found == {"steps": list(range(1, STEPS + 1)), "difference": None}
    for job in (plain.job, run.job):  # else bisect has compared fewer
        kept = {path.parent.name for path in job.glob("weights/v*/*.safetensors")}
        assert kept >= {f"v{step}" for step in range(1, STEPS + 1)}
    assert _explorers(run) == {"explorer", "second"}, "both have to have stored groups, or this shows less"
    second.kill()


def test_staleness_was_there(plain: TrinityRun) -> None:
    """Else the runs were synchronous, and this would show less."""
    lines = [json.loads(line) for line in (plain.job / "buffer/experience_buffer.jsonl").read_text().splitlines()]
    assert {line["staleness"] for line in lines} == {0, 1}
    assert all(line["versions"][0][0] == max(0, line["step"] - 2) for line in lines)
    assert len({line["reward"] for line in lines}) > 20


FORKED = 9


def test_a_fork_of_an_ended_run_is_equal_and_shares_its_files(runs: Runs, plain: TrinityRun) -> None:
    before = own_bytes(plain.job)
    made = fork(runs, plain, "--at", str(FORKED), "--name", "forked")
    assert made["groups"] == 2 * TASKS, "those of steps 10 and 11 are of weights that both share"
    assert own_bytes(Path(made["job"])) < 0.05 * before
    run = runs.run_fork(made)
    for name in ("trainer", "explorer"):
        status = run.until(lambda s: (s["step"] or 0) > FORKED + 2, 300, "steps of the fork")
        kill_process(status, name)
    assert run.finish(400) == 0, run.tail()
    assert bisect(plain, run) == {"steps": list(range(FORKED + 1, STEPS + 1)), "difference": None}
    lines = [json.loads(line) for line in (run.job / "buffer/experience_buffer.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == set(range(FORKED + 1, STEPS + 1))


def test_parent_and_fork_live_at_once_are_equal_with_kills_of_both(runs: Runs, plain: TrinityRun) -> None:
    parent = runs.start("alive")
    status = parent.until(lambda s: (s["step"] or 0) >= FORKED + 3, 300, "steps of the parent")
    with parent.channel(str(process_of(status, "trainer")["address"])) as channel:
        trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
        trainer.Pause(trainer_pb2.PauseRequest(), timeout=120)  # else it ends while the fork's engine starts
        made = fork(runs, parent, "--at", str(FORKED), "--name", "of-alive")
        run = runs.run_fork(made)
        status = run.until(lambda s: (s["step"] or 0) > FORKED + 1, 300, "steps of the fork")
        trainer.Resume(trainer_pb2.ResumeRequest(), timeout=10)
    kill_process(status, "trainer")
    status = parent.until(lambda s: process_of(s, "explorer")["pid"], 60, "the parent runs")
    for name in ("trainer", "buffer", "explorer"):
        kill_process(status, name)
    assert run.finish(500) == 0, run.tail()
    assert parent.finish(500) == 0, parent.tail()
    assert bisect(plain, parent)["difference"] is None
    assert bisect(parent, run) == {"steps": list(range(FORKED + 1, STEPS + 1)), "difference": None}


def test_a_fork_with_another_learning_rate_sees_the_same_first_tasks(runs: Runs, plain: TrinityRun) -> None:
    changed = ("--name", "rate", "algorithm.optimizer.lr=3e-3", f"buffer.total_steps={FORKED + 3}")
    made = fork(runs, plain, "--at", str(FORKED), *changed)
    run = runs.run_fork(made)
    assert run.finish(400) == 0, run.tail()
    found = bisect(plain, run)
    assert found["steps"] == list(range(FORKED + 1, FORKED + 4))
    assert found["difference"]["where"].startswith("actor/"), "step 10 has the same experience and another update"
    sides = [json.loads(line) for job in (plain.job, run.job) for line in (job / "monitor/trainer.jsonl").open()]
    rates = {side["actor/lr"] for side in sides if side["step"] == FORKED + 1}
    assert rates == {1e-3, 3e-3}


REUSED = 4


def test_a_regrade_trains_stored_groups_then_samples_and_kills_change_no_bit(runs: Runs, plain: TrinityRun) -> None:
    """Steps 10 to 13 train the parent's groups with other rewards; steps 14 to 16 have groups of the new run."""
    before = {path: path.stat().st_mtime_ns for path in plain.job.glob("global_step_*/**/*") if path.is_file()}
    entry = batch(plain, FORKED + 1)
    last = FORKED + REUSED + 3
    given = ("--from", str(FORKED), "--reuse", str(REUSED), "--reward", "even", f"buffer.total_steps={last}")
    regraded = [fork(runs, plain, *given, "--name", name, command="regrade") for name in ("even", "even-killed")]
    assert [made["changes"]["groups"] for made in regraded] == [REUSED * TASKS] * 2
    assert regraded[0]["changes"]["rewards_changed"] > 0
    one = runs.run_fork(regraded[0])
    assert one.finish(400) == 0, one.tail()
    other = runs.run_fork(regraded[1])
    for step, name in ((FORKED, "buffer"), (FORKED + 1, "trainer"), (FORKED + REUSED, "explorer")):
        status = other.until(lambda s, step=step: (s["step"] or 0) >= step, 300, f"step {step}")
        kill_process(status, name)
    assert other.finish(400) == 0, other.tail()
    assert bisect(one, other) == {"steps": list(range(FORKED + 1, last + 1)), "difference": None}
    steps = {line["step"]: line for line in map(json.loads, (other.job / "monitor/trainer.jsonl").open())}
    assert [steps[step].get("sample/regraded_groups") for step in range(FORKED + 1, last + 1)] == [
        *[float(TASKS)] * REUSED, None, None, None,
    ]  # fmt: skip
    assert steps[FORKED + REUSED]["sample/staleness_max"] > steps[last]["sample/staleness_max"]
    lines = [json.loads(line) for line in (other.job / "buffer/experience_buffer.jsonl").read_text().splitlines()]
    tasks = {line["task_id"]: line for line in lines if line["step"] <= FORKED + REUSED}
    parents = [json.loads(line) for line in (plain.job / "buffer/experience_buffer.jsonl").read_text().splitlines()]
    same = {line["task_id"]: line for line in parents if FORKED < line["step"] <= FORKED + REUSED}
    assert tasks.keys() == same.keys()
    assert {line["reward"] for line in lines} <= {0.0, 1.0}, "the new function also grades what is sampled later"
    assert batch(plain, FORKED + 1) == entry
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert not {path for path in plain.job.glob("global_step_*/**/*") if path.is_file()} - before.keys()


def test_one_flipped_byte_of_the_run_is_found_and_named(runs: Runs, plain: TrinityRun, tmp_path: Path) -> None:
    folder, key = tmp_path / "lineage", tmp_path / "lineage.pem"
    command = [sys.executable, "-m", "trinity.cli.main", "provenance", "--job", str(plain.job)]
    command += ["--out", str(folder), "--key", str(key)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = runs.folder / "data/train.jsonl"

    def check() -> tuple[int, str]:
        script = [sys.executable, "-I", "-S", str(folder / "verify.py"), str(folder), "--data", str(rows)]
        said = subprocess.run([*script, "--key", f"{key}.pub"], capture_output=True, text=True, timeout=60)
        return said.returncode, said.stdout + said.stderr

    code, said = check()
    assert (code, said.partition(" groups")[0]) == (0, f"whole: {STEPS} steps, {STEPS * TASKS}"), said
    assert f"{STEPS} versions" in said, "the versions of all steps; version 0 is the base model"
    parts = ("log/*.pb", "ledger/*.pb", "version/*.safetensors", "versions/*.pb", "checkpoint/**/*.safetensors")
    for path in (sorted(folder.glob(part))[-1] for part in parts):
        content = path.read_bytes()
        path.unlink()  # a checkpoint's files are links
        for place in (0, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            code, said = check()
            assert (code, str(path) in said) == (1, True), f"{path}, byte {place}: {said}"
        path.write_bytes(content)
    assert check()[0] == 0


def batch(run: TrinityRun, step: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "trinity.cli.main", "batch", "show", str(step), "--job", str(run.job), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=run.environment)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("", None),
        ("explorer.rollout_model.seed=43", ("task sums/", "rollout 0", "token_ids")),
        ("algorithm.optimizer.lr=2e-3", ("actor/lr",)),
        ("buffer.explorer_input.taskset.default_reward_fn_type=flipped", ("task sums/", "rollout 0", "reward")),
    ],
    ids=["nothing", "seed", "learning rate", "bits of rewards"],
)
def test_a_fresh_replay_names_what_changed(
    runs: Runs, short: TrinityRun, change: str, named: tuple[str, ...] | None
) -> None:
    command = [sys.executable, "-m", "trinity.cli.main", "replay", "--fresh", "--json", "--job", str(short.job)]
    command += [change] if change else []
    given = {**short.environment, "TRINITY_CHECKPOINT_ROOT_DIR": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=given)
    assert done.returncode == (0 if named is None else 1), done.stderr
    found = json.loads(done.stdout)
    assert found["steps"] == list(range(1, SHORT + 1))
    difference = found["difference"]
    if named is None:
        assert difference is None
    else:
        assert all(part in difference["where"] for part in named), difference


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_this_kind_is_equal_when_it_is_played_twice(runs: Runs, kind: str) -> None:
    played = []
    for name in ("one", "two"):
        run = runs.start(f"{kind}-{name}", KINDS[kind], steps=SHORT)
        assert run.finish(300) == 0, run.tail()
        played.append(run)
    assert bisect(*played) == {"steps": list(range(1, SHORT + 1)), "difference": None}
    lines = [json.loads(line) for line in (played[0].job / "buffer/experience_buffer.jsonl").read_text().splitlines()]
    assert len({line["reward"] for line in lines}) > 5, "else no weight changes"
    if kind == "turns":
        assert {line["metrics"]["steps"] for line in lines} == {3.0}
    else:
        assert list(played[0].job.glob("weights/v1/*.safetensors"))


def _explorers(run: TrinityRun) -> set[str]:
    stored = set()
    for name in ("explorer", "second"):
        log = run.job / f"log/{name}.log"
        if log.exists() and "explorer.group.stored" in log.read_text():
            stored.add(name)
    return stored
