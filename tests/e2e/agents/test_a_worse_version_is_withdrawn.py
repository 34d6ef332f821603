"""A whole run on live traffic publishes a version whose replies are worse: it is tried on a part of the calls, and
withdrawn by its rewards.

Users want what the base model says: its output head is large, so that few replies are likely. The learning rate spoils
the model in one step. The trainer computes such a version right: its canary passes.
"""

import json
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from support.programs.run import TrinityRun, write_config
from trinity.runtime.process import free_port
from trinity.sdk import CallRefused, reward_call

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

KEY, CALLERS, BATCH = "key-of-the-users", 4, 32
TRIAL = {"share": 0.25, "calls": 60}
HEAD = 40.0  # times its size
LEAST = -6.0  # nats of a token by the base model: its own replies have -1, those after a step of this size -15


class Users:
    """Ask one call after the other each, and reward nine of ten good answers at once."""

    def __init__(self, port: int, model: Path) -> None:
        self._base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.url = f"http://127.0.0.1:{port}/v1"
        self.worse: list[bool] = []  # of each reply
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(seed,), daemon=True) for seed in range(CALLERS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(60)
                assert not thread.is_alive()

    @torch.no_grad()
    def _nats(self, prompt: list[int], reply: list[int]) -> float:
        """The mean log-probability of a reply's tokens by the base model."""
        logs = self._base(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return float(logs.gather(1, torch.tensor(reply)[:, None]).mean())

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        with openai.OpenAI(base_url=self.url, api_key=KEY, max_retries=0, timeout=60) as client:
            while not self._stop.is_set():
                asked: list[Any] = [{"role": "user", "content": f"{rng.randrange(50)}+{rng.randrange(50)}"}]
                try:
                    done: Any = client.chat.completions.create(
                        model="policy", messages=asked, extra_body={"return_token_ids": True}
                    )
                    is_worse = self._nats(done.prompt_token_ids, done.choices[0].token_ids) < LEAST
                    self.worse.append(is_worse)
                    reward_call(self.url, KEY, done.id, float(not is_worse and rng.random() < 0.9))
                except (openai.OpenAIError, CallRefused, OSError):  # it starts, or samples by a withdrawn version
                    time.sleep(0.2)


@pytest.fixture
def model(quickstart_model: Path, tmp_path: Path) -> Path:
    shutil.copytree(quickstart_model, tmp_path / "model")
    weights = load_file(quickstart_model / "model.safetensors")
    large = {"lm_head.weight": weights["lm_head.weight"] * HEAD}
    save_file(weights | large, tmp_path / "model/model.safetensors", {"format": "pt"})
    return tmp_path / "model"


@pytest.fixture
def users(model: Path) -> Iterator[Users]:
    made = Users(free_port(), model)
    yield made
    made.stop()


@pytest.fixture
def run(repository: Path, model: Path, tmp_path: Path, users: Users) -> Iterator[TrinityRun]:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    port = int(users.url.removesuffix("/v1").rpartition(":")[2])
    changes: dict[str, Any] = {
        "model": {"model_path": str(model), "lora_configs": [{"lora_rank": 8, "merged": False}]},
        "algorithm": {"optimizer": {"lr": 1.0}},
        "buffer": {"batch_size": BATCH, "total_steps": 100, "explorer_input": {"eval_tasksets": []}},
        "explorer": {
            "proxy_port": port, "api_keys_file": str(tmp_path / "keys"), "traffic": {"trial": TRIAL, "guard": {}},
        },
        "synchronizer": {"versions_to_keep": 8, "canary_tolerance": 1e-3 * HEAD},  # rounding grows with the head
        "trainer": {"on_bad_step": "skip"},  # later steps of this size
        "stages": [],
    }  # fmt: skip
    config = write_config(repository / "examples/traffic/sums.yaml", tmp_path / "sums.yaml", changes)
    started = TrinityRun(config, tmp_path)
    yield started
    started.end()


def events(run: TrinityRun, name: str) -> list[dict[str, Any]]:
    lines = [line for file in run.job.rglob("log/*.log") for line in file.read_text().splitlines()]
    return [event for line in lines if name in line and (event := json.loads(line))["event"] == name]


def test_a_spoilt_version_answers_a_part_of_the_calls_until_it_is_withdrawn(run: TrinityRun, users: Users) -> None:
    run.start()
    users.start()
    run.until(lambda _: events(run, "buffer.guard.withdrew"), 700, "a version is withdrawn")
    ended, event = len(users.worse), events(run, "buffer.guard.withdrew")[0]
    loaded = "explorer.weights.loaded"
    run.until(lambda _: any(one["version"] == 0 for one in events(run, loaded)), 60, "the version before is back")
    users.stop()
    assert (event["version"], event["good"]) == (1, 0)
    tried = users.worse[users.worse.index(True) : ended]
    print(f"{len(users.worse)} replies, {len(tried)} in the trial, {sum(tried)} of them worse; {event['reason']}")
    assert sum(tried) / len(tried) < TRIAL["share"] + 0.15, "the version before answers the other calls"
    assert sum(tried) < TRIAL["calls"]
