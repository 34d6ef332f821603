"""DeepSpeed around the policy: one optimizer step from a batch, whatever the ZeRO stage and the number of ranks.

The loss of a micro-batch is its share of the global batch's loss, times the number of ranks because DeepSpeed averages
over them. Backward passes only accumulate (managed_gradient_accumulation is off); `step` reduces and updates. So the
gradient does not depend on how the batch was split.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist

from trinity.config import Plan
from trinity.trainer.algorithms.loss import LossInputs, compute_loss, wants_entropy_gradient
from trinity.trainer.algorithms.report import Report, join, means
from trinity.trainer.batch import TrainBatch
from trinity.trainer.microbatch import MicroBatch, collate, plan_micro_batches
from trinity.trainer.model import PolicyModel, load_policy
from trinity.trainer.ranks import Ranks
from trinity.trainer.schedule import learning_rate

log = structlog.get_logger(__name__)

# Parameters gathered together under ZeRO-3 when weights are read out.
_GATHER_BYTES = 512 * 1024 * 1024


class TrainEngine:
    """The policy, its optimizer and, if the algorithm needs it, the frozen reference."""

    def __init__(self, plan: Plan, ranks: Ranks, device: str) -> None:
        self._plan = plan
        self._ranks = ranks
        trainer = plan.config.trainer
        self.device = torch.device("cpu" if device == "cpu" else f"cuda:{ranks.local_rank}")
        choice = trainer.deepspeed.dtype
        on_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if choice == "bfloat16" or (choice == "auto" and on_gpu) else torch.float32
        self.zero_stage = trainer.deepspeed.zero_stage
        deepspeed = _import_deepspeed(self.device)
        if on_gpu:
            torch.cuda.set_device(self.device)
        deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo", verbose=False)
        chunk = trainer.logprob_chunk_tokens
        policy = load_policy(plan.config.model, self.dtype, chunk, trainer.gradient_checkpointing)
        self.reference = self._load_reference(chunk) if plan.algorithm.needs_reference else None
        self.optimizer = self._make_optimizer(policy)
        self._engine, *_ = deepspeed.initialize(model=policy, optimizer=self.optimizer, config=self._deepspeed_config())
        if self.zero_stage == 0 and self.dtype is torch.float32:
            _report_grad_norm(self._engine)
        self._padding = int(getattr(policy.model.config, "pad_token_id", None) or 0)
        self._deepspeed = deepspeed

    def _load_reference(self, chunk: int) -> PolicyModel:
        """The run's base model, frozen, whole on every rank."""
        reference = load_policy(self._plan.config.model, self.dtype, chunk, gradient_checkpointing=False)
        return reference.to(self.device).eval().requires_grad_(False)

    def _make_optimizer(self, policy: PolicyModel) -> torch.optim.Optimizer:
        config = self._plan.config.algorithm.optimizer
        if self._plan.config.trainer.deepspeed.offload_optimizer and self.device.type == "cuda":
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam(
                policy.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
            )
        return torch.optim.AdamW(
            policy.parameters(),
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=self.device.type == "cuda",
        )

    def _deepspeed_config(self) -> dict[str, Any]:
        trainer = self._plan.config.trainer
        zero: dict[str, Any] = {"stage": self.zero_stage}
        if trainer.deepspeed.offload_optimizer and self.device.type == "cuda":
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": trainer.grad_clip,
            "bf16": {"enabled": self.dtype is torch.bfloat16},
            "steps_per_print": 10**9,
        }

    @property
    def policy(self) -> PolicyModel:
        module: PolicyModel = self._engine.module
        return module

    def train(self, batch: TrainBatch, last_step: int) -> dict[str, float]:
        """One optimizer step; returns metrics over the whole batch. The same batch must be given on every rank."""
        rate = learning_rate(self._plan.config.algorithm.optimizer, batch.step, last_step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        lengths = [sequence.length for sequence in batch.sequences]
        budget = self._plan.micro_batch_tokens
        mine = plan_micro_batches(lengths, self._ranks.world_size, budget)[self._ranks.rank]
        self._engine.train()
        reports = []
        for indices in mine:
            micro = collate([batch.sequences[index] for index in indices], self._padding).to(self.device)
            reports.append(self._accumulate(micro, batch))
        self._engine.step()
        metrics = means(self._sum_over_ranks(join(reports)))
        norm = self._engine.get_global_grad_norm()
        if norm is not None:
            metrics["grad_norm"] = float(norm)
        metrics["lr"] = rate
        return metrics

    def _accumulate(self, micro: MicroBatch, batch: TrainBatch) -> Report:
        plan = self._plan.algorithm
        logprobs, entropy = self._engine(micro.input_ids, micro.attention_mask, micro.temperatures)
        inputs = LossInputs(
            logprobs=logprobs,
            entropy=entropy if wants_entropy_gradient(plan) else entropy.detach(),
            mask=micro.mask,
            old_logprobs=micro.old_logprobs,
            advantages=micro.advantages,
            reference_logprobs=self._reference_logprobs(micro),
        )
        loss, report = compute_loss(plan, inputs, batch.totals)
        self._engine.backward(loss * self._ranks.world_size, scale_wrt_gas=False)
        return report

    @torch.no_grad()
    def _reference_logprobs(self, micro: MicroBatch) -> torch.Tensor | None:
        if self.reference is None:
            return None
        logprobs, _ = self.reference(micro.input_ids, micro.attention_mask, micro.temperatures)
        result: torch.Tensor = logprobs
        return result

    def _sum_over_ranks(self, report: Report) -> Report:
        if self._ranks.world_size == 1:
            return report
        names = sorted(report)
        stacked = torch.stack([report[name] for name in names])
        dist.all_reduce(stacked)
        return dict(zip(names, stacked, strict=True))

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors by checkpoint name, in layer order; a collective under ZeRO-3, so on every rank together.

        A tensor is valid until the next one is asked for.
        """
        bucket: list[tuple[str, Any]] = []
        size = 0
        for name, parameter in self.policy.weights():
            bucket.append((name, parameter))
            size += getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
            if size >= _GATHER_BYTES:
                yield from self._gathered(bucket)
                bucket, size = [], 0
        yield from self._gathered(bucket)

    def _gathered(self, bucket: list[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        parameters = [parameter for _, parameter in bucket]
        whole = self.zero_stage == 3 and parameters
        context = self._deepspeed.zero.GatheredParameters(parameters) if whole else contextlib.nullcontext()
        with context:
            for name, parameter in bucket:
                yield name, parameter.data

    def save(self, folder: Path, state: dict[str, Any]) -> None:
        """Model and optimizer shards of all ranks into `folder`."""
        self._engine.save_checkpoint(str(folder), tag="deepspeed", client_state=state, save_latest=False)

    def load(self, folder: Path) -> dict[str, Any]:
        """Inverse of `save`; returns its state."""
        path, state = self._engine.load_checkpoint(str(folder), tag="deepspeed")
        if path is None:
            raise FileNotFoundError(f"{folder} holds no DeepSpeed checkpoint")
        return dict(state)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _import_deepspeed(device: torch.device) -> Any:
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("WARNING")
    if device.type == "cpu":
        # A shared-memory all-reduce that is compiled on first use (40 s); gloo does as well at these sizes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _report_grad_norm(engine: Any) -> None:
    """Plain float32 without ZeRO clips without keeping the norm; keep it."""
    from deepspeed.runtime.utils import clip_grad_norm_

    def clip() -> None:
        norm = clip_grad_norm_(engine.module.parameters(), max_norm=engine.gradient_clipping(), mpu=engine.mpu)
        engine._global_grad_norm = float(norm)

    engine.clip_fp32_gradients = clip
