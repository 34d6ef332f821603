"""The parts of benchmarks/faults for veRL that need no GPU: configuration, grader, restarts and probe."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "benchmarks/faults"
SYSTEMS = FAULTS / "systems"

pytestmark = [pytest.mark.extended, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (ROOT / "examples/quickstart", SYSTEMS, FAULTS):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("FAULTS_RECORDS", str(tmp_path))
    monkeypatch.setenv("FAULTS_GRADER", str(tmp_path / "grader.json"))
    (tmp_path / "grader.json").write_text('{"raises": [7]}')


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [json.loads(line) for file in folder.glob(f"{kind}-*.jsonl") for line in file.read_text().splitlines()]


def test_each_row_is_trained_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from make_model import make_tokenizer
    from systems.base import Settings
    from systems.verl_system import Verl, overrides
    from transformers import AutoTokenizer

    monkeypatch.setattr("systems.verl_system.ROOT", tmp_path)
    (tmp_path / "build/faults/verl/verl").mkdir(parents=True)
    make_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"row": row, "question": f"0+{row}", "answer": "0"} for row in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = Settings(tmp_path / "model", tmp_path, 8, 4, 3, tokens=24, save_every=5, seed=1, gpu=True)
    Verl().prepare(settings, tmp_path)
    made = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["prompt"][0]["content"], row["extra_info"]["index"]) for row in made] == [
        (f"0+{row}", row) for row in range(8)
    ]
    plain, verls = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("model", "tokenizer"))
    chat = made[0]["prompt"]
    assert verls.apply_chat_template(chat, add_generation_prompt=True) == plain.apply_chat_template(
        chat, add_generation_prompt=True
    )
    assert verls.convert_tokens_to_ids("<|im_end|>") == len(plain), "veRL asks for the token with this architecture"
    values = dict(text.split("=", 1) for text in overrides(settings, tmp_path))
    expected = {
        "data.shuffle": "False", "data.train_batch_size": "4", "actor_rollout_ref.actor.ppo_mini_batch_size": "4",
        "actor_rollout_ref.rollout.n": "3", "trainer.total_training_steps": "2", "trainer.total_epochs": "1",
        "trainer.save_freq": "5", "trainer.resume_mode": "auto", "trainer.default_local_dir": str(tmp_path / "disk"),
    }  # fmt: skip
    assert expected.items() <= values.items()
    assert Verl().command(settings, tmp_path)[1:3] == [str(SYSTEMS / "verl_requeue.py"), "20"]
    assert Path(values["reward.reward_manager.module.path"]).is_file()


@pytest.mark.parametrize(("row", "value"), [(3, 0.5), (7, None)])
def test_a_response_is_graded_by_its_row_and_tokens(row: int, value: float | None, tmp_path: Path) -> None:
    from grader import GraderUnavailable
    from verl_reward import Rewards

    item = SimpleNamespace(
        batch={"responses": torch.tensor([5, 6, 0, 0]), "attention_mask": torch.tensor([1, 1, 1, 1, 1, 0, 0])},
        non_tensor_batch={"extra_info": {"index": row}},
    )
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join("ab1234x"[one] for one in ids))
    given = Rewards(tokenizer, compute_score=None).run_single([item])
    if value is None:
        with pytest.raises(GraderUnavailable):
            asyncio.run(given)
    else:
        assert asyncio.run(given) == {"reward_score": value, "reward_extra_info": {"acc": value}}
    [line] = lines(tmp_path, "grade")
    assert (line["row"], line["ids"], line["value"]) == (row, [5, 6], value)


FAILS_ONCE = """
import pathlib, subprocess, sys
left = subprocess.Popen(["sh", "-c", "setsid sleep 600 & echo $!"], stdout=subprocess.PIPE)
with open("orphans", "ab") as file:
    file.write(left.stdout.readline())
sys.exit(3 if len(pathlib.Path("orphans").read_text().split()) < 3 else 0)
"""


def test_a_command_is_started_again_without_the_processes_of_its_last_start(tmp_path: Path) -> None:
    command = [sys.executable, str(SYSTEMS / "verl_requeue.py"), "5", sys.executable, "-c", FAILS_ONCE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count("ended with 3") == 2
    orphans = [int(pid) for pid in (tmp_path / "orphans").read_text().split()]
    assert len(orphans) == 3
    assert not any(psutil.pid_exists(pid) for pid in orphans)
    (tmp_path / "orphans").unlink()
    command[2] = "2"
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60).returncode == 3


PROCESSES = """
import os, sitecustomize, torch
from types import SimpleNamespace
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension as Worker
if os.fork() == 0:
    worker = Worker()
    worker.model_runner = SimpleNamespace(model=torch.nn.Linear(3, 1, bias=False))
    worker.update_weights_from_ipc()
    os._exit(0)
os.wait()
print(sitecustomize.ENGINE.bits())
for norm in (float("nan"), 1.0):
    FSDPEngine.norm = norm
    FSDPEngine().optimizer_step()
"""


def test_the_probe_joins_the_engines_processes_and_sees_steps_left_out(tmp_path: Path) -> None:
    import probe

    modules = {
        "engine/fsdp/transformer_impl.py": "class FSDPEngine:\n    def optimizer_step(self):\n"
        "        return self.norm\n",
        "rollout/vllm_rollout/utils.py": "class vLLMColocateWorkerExtension:\n    def update_weights_from_ipc(self):\n"
        "        self.model_runner.model.weight.data.fill_(2.0)\n",
    }
    for name, source in modules.items():
        module = tmp_path / "verl/workers" / name
        module.parent.mkdir(parents=True)
        module.write_text(source)
    paths = os.pathsep.join(map(str, (SYSTEMS / "verl_site", FAULTS, tmp_path)))
    variables = {**os.environ, "PYTHONPATH": paths, "FAULTS_DTYPE": "bfloat16"}
    command = [sys.executable, "-c", PROCESSES]
    done = subprocess.run(command, env=variables, check=True, timeout=60, capture_output=True, text=True)
    assert int(done.stdout) == probe.bits([torch.full((1, 3), 2.0)])
    assert [line["kind"] for line in lines(tmp_path, "train")] == ["left out"]


def test_sequences_of_a_step_that_is_left_out_are_in_no_step(tmp_path: Path) -> None:
    import audit
    import probe

    work = audit.Work([(1, 2), (1, 3)], group=1, tasks=1, special=frozenset({0}))
    made = {"before": "a", "after": "b", "bits": 1, "finite": True}
    probe.record("train", kind="forward", ids=[[1, 2, 9, 0]])
    probe.record("train", kind="left out")
    probe.record("train", kind="forward", ids=[[1, 3, 8, 0]])
    probe.record("train", kind="step", **made)
    [step] = audit.read_steps(tmp_path, work)
    assert dict(step.sequences) == {(1, (8,)): 1}
