"""The plainest loops of tinker-cookbook, unmodified and as a user starts them, run against `trinity tinker`.

The cookbook asks a hub for its data and its tokenizer by name. Folders of those names in the working directory answer,
so no network is used. The model below the cookbook's default name is the quickstart's, which writes `\\boxed{3}` or
`\\boxed{7}` by chance.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.servers.tinker_stack import serve_example
from trinity.runtime.process import free_port

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

# What the two loops import and the project does not have. The cookbook's own ranges exclude the project's pins.
PACKAGES = (
    "tinker-cookbook==0.6.1", "chz==0.4.0", "blobfile==3.3.0", "lxml==6.1.3", "pycryptodomex==3.24.2",
    "pylatexenc==2.11",
)  # fmt: skip
MODEL = "Qwen/Qwen3.5-9B-Base"  # the default of both loops
_LOOP_SECONDS = 240


@dataclass(frozen=True)
class _Place:
    """A gateway, and a working directory with the data and the model."""

    folder: Path
    environment: dict[str, str]

    def run(self, loop: str, **settings: Any) -> list[dict[str, Any]]:
        """Runs a module of the cookbook until it ends. Returns the metrics of its steps."""
        log = self.folder / loop
        given = [f"{name}={value}" for name, value in {"log_path": log, **settings}.items()]
        command = [sys.executable, "-m", f"tinker_cookbook.recipes.{loop}", *given]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=_LOOP_SECONDS
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return _lines(log / "metrics.jsonl")

    def checkpoints(self, loop: str) -> list[dict[str, Any]]:
        return _lines(self.folder / loop / "checkpoints.jsonl")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def place(repository: Path, quickstart_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Place]:
    folder = tmp_path_factory.mktemp("cookbook")
    _make_model(quickstart_model, folder / MODEL)
    _make_data(folder)
    port = free_port()
    process = serve_example(
        repository, folder, folder / MODEL, port, f"base_model={MODEL}", "max_length=1024", "max_rank=8"
    )
    environment = os.environ | {
        "PYTHONPATH": str(_packages(repository)), "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0",
        "TINKER_BASE_URL": f"http://127.0.0.1:{port}",
        "TINKER_API_KEY": (folder / "tinker/quickstart/keys/alice").read_text().strip(),
        "HF_HOME": str(folder / "hub"),
    }  # fmt: skip
    yield _Place(folder, environment)
    process.terminate()
    process.wait(timeout=60)


def _packages(repository: Path) -> Path:
    """Installs the cookbook outside the project's environment, once."""
    folder = repository / "build/cookbook/0.6.1"
    if not folder.is_dir():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(part)]
        subprocess.run([*install, *PACKAGES], check=True, timeout=300)
        part.rename(folder)
    return folder


def _make_model(source: Path, folder: Path) -> None:
    r"""Copies the quickstart's model, and lets "Assistant:" be followed by `\boxed{3}` or `\boxed{7}`, each half of the
    time: embeddings and output projection have a column for each letter of the chain, and the layers add nothing."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    shutil.copytree(source, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    embeddings, output = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    chain = [*":\\boxed{", "37", "}", tokenizer.eos_token]
    ids = [[tokenizer.convert_tokens_to_ids(one) for one in ([part] if len(part) > 2 else part)] for part in chain]
    columns = torch.eye(embeddings.shape[1])
    for column, (before, after) in enumerate(pairwise(ids)):
        embeddings[before] = columns[column]
        output[after] = columns[column] + columns[-len(after) :]  # a second column, by which adapters tell 3 from 7
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _make_data(folder: Path) -> None:
    """Writes both data sets in the form that they have on the hub."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def write(path: str, rows: list[dict[str, Any]]) -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), folder / path)

    asked = [{"question": f"What is {n} + {7 - n}?", "answer": f"{n} + {7 - n} = 7\n#### 7"} for n in range(8)] * 8
    write("openai/gsm8k/main/train-00000-of-00001.parquet", asked)
    write("openai/gsm8k/main/test-00000-of-00001.parquet", asked[:8])
    configs = "configs:\n- config_name: main\n  data_files:\n"
    files = "".join(f"  - split: {split}\n    path: main/{split}-*\n" for split in ("train", "test"))
    (folder / "openai/gsm8k/README.md").write_text(f"---\n{configs}{files}---\n")
    chats = [
        {
            "prompt": f"Name {n}.",
            "prompt_id": str(n),
            "messages": [
                {"role": "user", "content": f"Name {n}."},
                {"role": "assistant", "content": f"It is {n}."},
            ],
            "category": "Chat",
        }
        for n in range(160)
    ]
    write("HuggingFaceH4/no_robots/data/train-00000-of-00001.parquet", chats)
    write("HuggingFaceH4/no_robots/data/test-00000-of-00001.parquet", chats[:8])


def test_the_loop_of_sft_learns_and_saves(place: _Place) -> None:
    steps = place.run("sl_loop", batch_size=16, learning_rate=0.003, lora_rank=8, save_every=4)
    losses = [step["train_mean_nll"] for step in steps]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 1, losses
    saved = place.checkpoints("sl_loop")
    assert [one["name"] for one in saved] == ["000004", "000008", "final"]
    assert "/weights/" in saved[-1]["state_path"] and "/sampler_weights/" in saved[-1]["sampler_path"]


def test_the_loop_of_rl_raises_its_reward(place: _Place) -> None:
    steps = place.run(
        "rl_loop", batch_size=4, group_size=8, learning_rate=0.003, lora_rank=8, max_tokens=16, max_steps=6,
        save_every=4, loss_fn="importance_sampling",
    )  # fmt: skip
    rewards = [step["reward/total"] for step in steps]
    assert len(rewards) == 6
    assert 0.15 < rewards[0] < 0.85, "the model writes 3 or 7, and 7 is right"
    assert sum(rewards[-2:]) / 2 > 0.85, rewards
    assert [one["name"] for one in place.checkpoints("rl_loop")] == ["000004", "final"]
