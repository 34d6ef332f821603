"""veRL on one GPU: its trainer and its vLLM engine take turns on it (trainer mode `sync`).

veRL resumes from its newest checkpoint (`trainer.resume_mode`). It has no supervisor: a scheduler that queues failed
jobs starts it again. `verl_requeue.py` stands for one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from systems.base import ROOT, Settings

PACKAGES = (
    "verl==0.9.1", "transformers==5.6.2", "tokenizers==0.22.2", "huggingface-hub==1.33.0", "hf-xet==1.8.0",
    "ray==2.55.1", "tensordict==0.10.0", "pyvers==0.1.0", "orjson==3.13.0", "TransferQueue==0.1.11",
    "hydra-core==1.3.3", "omegaconf==2.3.1", "antlr4-python3-runtime==4.9.3", "torchdata==0.11.0", "codetiming==1.4.0",
    "datasets==5.0.0", "dill==0.4.1", "multiprocess==0.70.19", "cachetools==8.0.2", "pylatexenc==2.11",
)  # fmt: skip
STARTS = 20
_HERE = Path(__file__).parent


class Verl:
    name = "verl"
    ahead, parts = 0, frozenset({"engine"})
    recovery = f"the command is started again up to {STARTS} times, as a scheduler would; trainer.resume_mode=auto"

    def prepare(self, settings: Settings, folder: Path) -> None:
        if not settings.gpu:
            raise SystemExit("verl: has no form for CPUs; say --gpu, or name other --systems")
        if not (self._packages / "verl").is_dir():  # beside, not in, the project's environment
            install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(self._packages)]
            subprocess.run([*install, *PACKAGES], check=True)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(settings.model)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})  # asked for with Qwen2, never used
        tokenizer.save_pretrained(folder / "tokenizer")
        rows = [json.loads(line) for line in (settings.data / "train.jsonl").read_text().splitlines()]
        (folder / "rows.jsonl").write_text("".join(json.dumps(_row_of(row)) + "\n" for row in rows))

    def command(self, settings: Settings, folder: Path) -> Sequence[str]:
        main = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(settings, folder)]
        return [sys.executable, str(_HERE / "verl_requeue.py"), str(STARTS), *main]

    def beside(self, what: str, folder: Path) -> Sequence[str]:
        raise NotImplementedError(what)

    def sampler(self, root: psutil.Process) -> psutil.Process | None:
        """The process that holds the engine's weights; the engine core is another."""
        found = (one for one in root.children(recursive=True) if "VLLM::Worker" in "".join(one.cmdline()))
        return next(found, None)

    def paths(self) -> Sequence[str]:
        return [str(_HERE / "verl_site"), str(self._packages)]

    @property
    def _packages(self) -> Path:
        return ROOT / "build/faults/verl"


def overrides(settings: Settings, folder: Path) -> list[str]:
    """veRL's configuration, as arguments of its entry point."""
    actor, rollout, model = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
    rows = folder / "rows.jsonl"
    values: dict[str, Any] = {
        "data.train_files": rows, "data.val_files": rows, "data.shuffle": False, "data.dataloader_num_workers": 1,
        "data.train_batch_size": settings.tasks, "data.max_prompt_length": 32,
        "data.max_response_length": settings.tokens,
        "algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": False,
        f"{model}.path": settings.model, f"{model}.tokenizer_path": folder / "tokenizer",
        f"+{model}.override_config.attn_implementation": "sdpa",
        f"{model}.enable_gradient_checkpointing": False,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.optim.lr": 1e-4, f"{actor}.optim.lr_scheduler_type": "constant",
        f"{actor}.ppo_mini_batch_size": settings.tasks,
        f"{actor}.use_dynamic_bsz": True, f"{actor}.ppo_max_token_len_per_gpu": 8192,
        f"{actor}.use_kl_loss": False, f"{actor}.entropy_coeff": 0,
        f"{actor}.use_torch_compile": False, f"{actor}.fsdp_config.use_torch_compile": False,
        f"{rollout}.name": "vllm", f"{rollout}.n": settings.group, f"{rollout}.temperature": 1.0,
        f"{rollout}.tensor_model_parallel_size": 1, f"{rollout}.gpu_memory_utilization": 0.3,
        f"{rollout}.enforce_eager": True, f"{rollout}.max_model_len": settings.tokens + 64,
        f"{rollout}.max_num_seqs": settings.tasks * settings.group, f"{rollout}.seed": settings.seed,
        f"{rollout}.agent.num_workers": 2,
        "reward.num_workers": 2,
        "reward.reward_manager.source": "importlib", "reward.reward_manager.name": "Rewards",
        "reward.reward_manager.module.path": _HERE / "verl_reward.py",
        "trainer.v1.trainer_mode": "sync",
        "trainer.nnodes": 1, "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": settings.steps, "trainer.total_epochs": 1,
        "trainer.logger": "[console]", "trainer.test_freq": -1, "trainer.val_before_train": False,
        "trainer.save_freq": settings.save_every, "trainer.max_actor_ckpt_to_keep": 2,
        "trainer.resume_mode": "auto", "trainer.default_local_dir": folder / "disk",
        "ray_kwargs.ray_init.num_cpus": max(24, os.cpu_count() or 0),  # actors of veRL reserve more than they use
        "+ray_kwargs.ray_init.num_gpus": 1, "+ray_kwargs.ray_init.include_dashboard": False,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "hydra.run.dir": folder / "hydra",
    }  # fmt: skip
    return [f"{key}={value}" for key, value in values.items()]


def _row_of(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "data_source": "faults",
        "prompt": [{"role": "user", "content": row["question"]}],
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"index": row["row"]},
    }
