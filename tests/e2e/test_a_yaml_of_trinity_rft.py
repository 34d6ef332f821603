"""A YAML as Trinity-RFT publishes it, run with a plugin's reward and policy loss.

Then everything that is done with a finished job, by its commands.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trinity.runtime.process import free_port
from trinity.weights.checkpoint_manifest import ManifestWriter

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 2
_ANSWER_SECONDS = 240.0  # the first answers of an engine come late where others share the cores
OVERRIDES = [
    "project=published",
    "name=gsm8k",
    "buffer.batch_size=4",
    f"buffer.total_steps={STEPS}",
    "model.max_model_len=256",
    "model.max_response_tokens=24",
    "trainer.save_interval=1",
    "buffer.explorer_input.taskset.default_reward_fn_type=short_reward",
    "algorithm.policy_loss_fn=faded",
    "algorithm.policy_loss_fn_args={width: 0.3}",
    "buffer.explorer_input.eval_tasksets.0.rollout_args.temperature=0.0",
    "buffer.explorer_input.eval_tasksets.0.repeat_times=2",
    "monitor.monitor_type=wandb",
]
RULES = "LIMIT = 60\n"
REWARD = """
from trinity.plugins import reward_function
from lengths import LIMIT

@reward_function("short_reward")
def short_reward(item, args):
    assert len(item.token_ids) == item.response_tokens and item.task["question"]
    return {"short": float(len(item.response) < LIMIT), "truncated": -0.5 * item.truncated}
"""

LOSS = """
from trinity.plugins import Positive, policy_loss

@policy_loss("faded", traits=["ratio"])
def faded(x, share, *, width: Positive = 0.2):
    \"\"\"-A r, fading by exp(-(r - 1)^2 / width^2) where r leaves 1.\"\"\"
    from trinity.trainer.algorithms.aggregation import masked_sum

    ratio = (x.logprobs - x.old_logprobs).clamp(-20, 20).exp()
    gate = (-((ratio.detach() - 1) / width).square()).exp()
    return share(-x.advantages * ratio * gate, x.mask), {"gate_of_mine": masked_sum(gate, x.mask)}
"""


@dataclass
class Job:
    """A finished run and how to call commands about it."""

    yaml: Path
    folder: Path
    environment: dict[str, str]
    output: str

    def trinity(self, *arguments: str, seconds: float = 200) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "trinity.cli.main", *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=seconds)


@pytest.fixture(scope="module")
def job(repository: Path, quickstart_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("published")
    data = [sys.executable, str(repository / "examples/quickstart/make_data.py"), str(folder / "data")]
    subprocess.run([*data, "--test-size", "6"], check=True, timeout=60, capture_output=True)
    plugins = folder / "plugins"
    plugins.mkdir()
    (plugins / "lengths.py").write_text(RULES)
    (plugins / "rewards.py").write_text(REWARD)
    (plugins / "losses.py").write_text(LOSS)
    environment = {
        **os.environ,
        "TRINITY_CHECKPOINT_ROOT_DIR": str(folder / "jobs"),
        "TRINITY_MODEL_PATH": str(quickstart_model),
        "TRINITY_TASKSET_PATH": str(folder / "data"),
        "TRINITY_PLUGIN_DIRS": str(plugins),
        "WANDB_MODE": "offline",
    }
    yaml = repository / "satellites/trinity_rft/tests/trinity_rft/grpo_gsm8k.yaml"
    made = Job(yaml, folder / "jobs/published/gsm8k", environment, "")
    done = made.trinity("run", "--config", str(yaml), *OVERRIDES, seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    made.output = done.stdout
    return made


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_job_folder_is_laid_out_as_users_know_it(job: Job) -> None:
    for step in (1, STEPS):
        assert (job.folder / f"global_step_{step}/actor/huggingface/config.json").is_file()
    assert (job.folder / f"global_step_{STEPS}/actor/huggingface/model.safetensors").is_file()
    assert (job.folder / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
    assert (job.folder / "latest_state_dict_iteration.txt").read_text() == str(STEPS)
    assert json.loads((job.folder / "trainer_meta.json").read_text())["latest_iteration"] == STEPS
    explorer = json.loads((job.folder / "explorer_meta.json").read_text())
    assert (explorer["latest_iteration"], explorer["position"]) == (STEPS, 4 * STEPS)
    for name in ("buffer", "log", "monitor"):
        assert (job.folder / name).is_dir()


def test_metrics_of_both_runs_are_kept_and_the_plugins_parts_among_them(job: Job) -> None:
    explorer, trainer = _lines(job.folder / "monitor/explorer.jsonl"), _lines(job.folder / "monitor/trainer.jsonl")
    assert [line["step"] for line in trainer] == list(range(1, STEPS + 1))
    assert all(0 <= line["actor/gate_of_mine"] <= 1 for line in trainer), "reported by the plugin's policy loss"
    rollout = next(line for line in explorer if "rollout/short/mean" in line)
    assert 0 <= rollout["rollout/short/mean"] <= 1
    assert rollout["rollout/finished_task_count"] == 4
    evaluation = next(line for line in explorer if "eval/gsm8k-eval/accuracy/mean@2" in line)
    assert evaluation["eval/gsm8k-eval/accuracy/std@2"] == 0, "greedy rollouts do not differ"
    assert "eval/gsm8k-eval/accuracy/best@2" in evaluation
    assert list((job.folder / "monitor").glob("wandb/offline-run-*")), "wandb's offline run"


def test_what_was_trained_can_be_seen(job: Job) -> None:
    shown = json.loads(job.trinity("view", "--job", str(job.folder), "--json").stdout)
    assert len(shown) == 4 * 8
    assert {line["step"] for line in shown} == {STEPS}
    assert all(line["versions"] for line in shown)
    first = shown[0]
    assert first["reward"] == pytest.approx(first["metrics"]["short"] + first["metrics"]["truncated"])
    assert "experience 0 of 32" in job.trinity("view", "--job", str(job.folder), "--index", "0").stdout
    log = job.trinity("log", "--job", str(job.folder), "-n", "400").stdout
    assert "trainer.checkpoint.saved" in log
    assert "explorer.weights.loaded" in log
    assert json.loads(job.trinity("status", "--job", str(job.folder), "--json").stdout)["state"] == "finished"


def test_bench_evaluates_base_and_every_checkpoint_as_the_run_itself_did(job: Job) -> None:
    assert not (job.folder / "global_step_1/actor/huggingface/model.safetensors").exists()
    done = job.trinity("run", "--config", str(job.yaml), *OVERRIDES, "mode=bench", seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = job.folder.glob("bench/*/bench.json")
    results = {result["step"]: result["metrics"] for result in json.loads(file.read_text())["results"]}
    assert sorted(results) == [0, 1, STEPS]
    assert (job.folder / "global_step_1/actor/huggingface/model.safetensors").exists(), "converted on the way"
    summary = json.loads((job.folder / "summary.json").read_text())
    before = {e["step"]: e["metrics"] for e in summary["stages"][-1]["evaluations"]}
    for step in (0, STEPS):
        assert results[step]["response_tokens/mean@2"] == before[step]["response_tokens/mean@2"]


@pytest.fixture
def endpoint(job: Job) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "trinity.cli.main", "run", str(job.yaml), *OVERRIDES, "mode=serve"]
    output = job.folder / "serve.out"
    with output.open("wb") as out:
        server = subprocess.Popen(
            [*command, f"explorer.proxy_port={port}"], env=job.environment, stdout=out, stderr=out
        )
    try:
        deadline = time.monotonic() + 400
        while "serving http" not in output.read_text():
            assert server.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=90) == 128 + signal.SIGINT
    finally:
        server.kill()


def test_serve_answers_an_openai_client_and_follows_new_checkpoints(
    job: Job, endpoint: str, quickstart_model: Path
) -> None:
    """The same long prompt before and after: no key-value block of the older weights may be used again."""
    from openai import AuthenticationError, OpenAI

    with pytest.raises(AuthenticationError):
        OpenAI(base_url=endpoint, api_key="none", timeout=_ANSWER_SECONDS).models.list()
    client = OpenAI(base_url=endpoint, api_key=(job.folder / "serve.keys").read_text().strip(), timeout=_ANSWER_SECONDS)
    assert [model.id for model in client.models.list().data] == ["gsm8k"]
    asked: list[Any] = [{"role": "user", "content": "7+8=15 " * 28}]
    answer = client.chat.completions.create(model="gsm8k", messages=asked, max_tokens=8, n=2, temperature=0.5)
    assert len(answer.choices) == 2
    stream = client.chat.completions.create(model="gsm8k", messages=asked, max_tokens=4, stream=True)
    assert len(list(stream)) >= 2

    def sampled() -> float:
        made = client.chat.completions.create(model="gsm8k", messages=asked, max_tokens=1, temperature=0, logprobs=True)
        assert made.choices[0].logprobs is not None
        content = made.choices[0].logprobs.content
        assert content is not None
        return content[0].logprob

    trained = job.folder / f"global_step_{STEPS}/actor/huggingface"
    assert sampled() == pytest.approx(_greedy_logprob(trained, asked), abs=1e-4)
    newer = job.folder / "global_step_9"
    shutil.copytree(quickstart_model, newer / "actor/huggingface")
    _sharpen(newer / "actor/huggingface")
    ManifestWriter(newer).write()
    (newer / ".full_checkpoint").touch()
    deadline = time.monotonic() + 300
    while '"step": 9' not in (said := (job.folder / "log/serve.log").read_text()):
        assert time.monotonic() < deadline, "the new checkpoint was not loaded"
        time.sleep(0.2)
    assert "has no manifest" not in said
    expected = _greedy_logprob(newer / "actor/huggingface", asked)
    assert abs(expected - _greedy_logprob(trained, asked)) > 0.1, "the two models must differ to show anything"
    assert sampled() == pytest.approx(expected, abs=1e-4)


def _sharpen(folder: Path) -> None:
    """Twice as large logits: another model, beyond doubt."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _greedy_logprob(folder: Path, messages: list[Any]) -> float:
    """Log-probability of the likeliest next token, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).max())
