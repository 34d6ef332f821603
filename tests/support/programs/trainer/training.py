"""Ranks of the trainer's engine as processes, on a tiny model and a fixed batch; what they learnt comes back as arrays.

python -m support.programs.trainer.training JOB.json      (one process per rank, with torchrun's variables)
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from support.fakes.data.experience import make_experience
from support.programs.forked import ForkedModule
from trinity.runtime.process import free_port

BASE: dict[str, Any] = {
    "project": "t",
    "name": "t",
    "model": {"max_prompt_tokens": 16, "max_response_tokens": 16},
    "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, "optimizer": {"lr": 1e-2, "weight_decay": 0.0}},
    "buffer": {
        "batch_size": 4,
        "total_steps": 100,
        "explorer_input": {"taskset": {"name": "t", "path": "d.jsonl"}},
    },
    "trainer": {"grad_clip": 0.5, "gradient_checkpointing": False},
}


def make_model(folder: Path, tied: bool = False, key_heads: int = 2) -> Path:
    """A Qwen2 of 2 layers with random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=key_heads, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def make_gpt2(folder: Path) -> Path:
    """A GPT-2 of 2 layers with random weights and, as its configs have it by default, dropout."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
    assert config.resid_pdrop == config.embd_pdrop == config.attn_pdrop == 0.1
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def run_ranks(folder: Path, model: Path, *, ranks: int, zero: int, seconds: float = 150, **job: Any) -> dict[str, Any]:
    """Parameters by name, and the metrics of each step under "metrics"."""
    folder.mkdir(parents=True, exist_ok=True)
    job_file = folder / "job.json"
    config = json.loads(json.dumps(BASE))
    config["model"]["model_path"] = str(model)
    config["checkpoint_root_dir"] = str(folder)
    config["trainer"] |= {"deepspeed": {"zero_stage": zero, "dtype": "float32"}, **job.pop("trainer", {})}
    config["algorithm"] |= job.pop("algorithm", {})
    job_file.write_text(json.dumps({"config": config, "folder": str(folder), **job}))
    output = folder / "job.out"
    codes = wait_for(start_module("support.programs.trainer.training", job_file, ranks, output), seconds)
    if job.get("die_after") is not None:
        assert all(code == -9 for code in codes), output.read_text(errors="replace")
        return {}
    assert codes == [0] * ranks, output.read_text(errors="replace")[-4000:]
    found: dict[str, Any] = dict(np.load(folder / "parameters.npz"))
    found["metrics"] = json.loads((folder / "metrics.json").read_text())
    return found


def start_module(module: str, job: Path, ranks: int, output: Path) -> list[ForkedModule]:
    """One process a rank, with torchrun's variables."""
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    common = {**os.environ, **port, **world}
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return [ForkedModule(module, [str(job)], {**common, **variables}, output) for variables in own]


def wait_for(processes: list[ForkedModule], seconds: float) -> list[int]:
    """Their exit codes. What has not ended by then is killed."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in processes:
        process.kill()
    return [process.wait(timeout=20) for process in processes]


def fixed_batch(step: int, *, rewards: str = "random", trees: bool = False):  # type: ignore[no-untyped-def]
    """Ragged groups, the same for the same step: 16 sequences, one of them with an empty mask.

    trees: the sequences of a group have a common prompt, and two of them begin their responses with the same tokens.
    """
    import torch

    from trinity.trainer.algorithms import advantages
    from trinity.trainer.data.batch import TrainBatch, TrainSequence

    rng = np.random.default_rng(step)
    values = rng.integers(0, 2, 16).astype(float) if rewards == "random" else np.ones(16)
    groups = np.arange(16) // 4
    scores = advantages.grpo(torch.tensor(values), torch.tensor(groups))
    sequences = []
    for index in range(16):
        prompt, response = int(rng.integers(1, 10)), int(rng.integers(1, 14))
        sequences.append(
            TrainSequence(
                token_ids=rng.integers(0, 97, prompt + response).astype(np.int32),
                prompt_length=prompt,
                old_logprobs=np.full(response, -4.5, np.float32),
                mask=np.ones(response, bool) if index != 5 else np.zeros(response, bool),
                group=int(groups[index]),
                reward=float(values[index]),
                advantage=float(scores[index]),
            )
        )
    if trees:
        prompts, turns = rng.integers(0, 97, (4, 15)).astype(np.int32), rng.integers(0, 97, (4, 9)).astype(np.int32)
        for index, s in enumerate(sequences):
            parts = [turns[s.group], s.token_ids[s.prompt_length :]][-1 - (index % 4 > 1) :]
            length = sum(map(len, parts))
            sequences[index] = replace(
                s, token_ids=np.concatenate([prompts[s.group], *parts]), prompt_length=15,
                old_logprobs=np.full(length, -4.5, np.float32), mask=np.full(length, s.mask.any()),
            )  # fmt: skip
    return TrainBatch(step=step, sequences=tuple(sequences))


def with_routes(batch: Any, layers: int, chosen: int, experts: int) -> Any:
    """The batch as if an engine had sent every token to other experts than the gates choose, the same each time."""
    from trinity.data.routes import Routes

    rng = np.random.default_rng(batch.step)
    sequences = []
    for sequence in batch.sequences:
        scores = rng.random((sequence.length - 1, layers, experts))
        ids = np.argsort(scores, -1)[..., :chosen].astype(np.uint8)
        sequences.append(replace(sequence, routes=Routes.of(ids)))
    return replace(batch, sequences=tuple(sequences))


def of_experiences(batch: Any) -> Any:
    """The batch as if its sequences were those of the log: then a step may record their tokens."""
    rng = np.random.default_rng(0)
    sequences = (replace(s, experience=make_experience(rng, row, 1, 0)) for row, s in enumerate(batch.sequences))
    return replace(batch, sequences=tuple(sequences))


def recorded(values: list[Any]) -> dict[str, np.ndarray]:
    """TokenValues of sequences laid end to end; an array is missing where it is of none of them."""
    names = ("logprobs", "entropy", "clipped", "proximal_logprobs")
    found = {name: [getattr(one, name) for one in values if one is not None] for name in names}
    return {
        name: np.concatenate(parts).astype(np.float32)
        for name, parts in found.items()
        if parts and parts[0] is not None
    }


def save_as_before(engine: Any, folder: Path, state: dict[str, Any]) -> None:
    """As former versions did: one shard for each rank, by DeepSpeed."""
    critic = engine._critic and engine._critic.model
    for model, where, of in ((engine._model, folder, state), (critic, folder.with_name("critic"), {})):
        if model is not None:
            model.engine.save_checkpoint(
                str(where), tag="deepspeed", client_state=of, save_latest=False, exclude_frozen_parameters=True
            )


def main() -> None:
    import torch

    from trinity.config import make_plan
    from trinity.config.schema import Config
    from trinity.trainer.engine import TrainEngine
    from trinity.trainer.process.ranks import ranks_from_environment

    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(job["folder"])
    ranks = ranks_from_environment(1)
    engine = TrainEngine(make_plan(Config.model_validate(job["config"])), ranks, "cpu")
    first = 1
    if job.get("load"):
        first = int(engine.load(Path(job["load"]))["step"]) + 1
    metrics = []
    for step in range(first, int(job.get("steps", 1)) + 1):
        metrics.append(engine.train(fixed_batch(step, rewards=job.get("rewards", "random")), 100))
        if job.get("save_at") == step:
            engine.snapshot(folder / "saved", {"step": step})()
            if job.get("as_before"):
                save_as_before(engine, folder / "saved", {"step": step})
        if job.get("die_after") == step:
            os.kill(os.getpid(), 9)
    weights = {name: tensor.clone().numpy() for name, tensor in engine.weights.read()}
    if ranks.is_first:
        np.savez(folder / "parameters.npz", **weights)
        (folder / "metrics.json").write_text(json.dumps(metrics))
    engine.close()


if __name__ == "__main__":
    main()
