"""Wraps a trained module, policy or critic, in DeepSpeed."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trinity.config.schema.algorithm import OptimizerConfig
from trinity.config.schema.trainer import TrainerConfig
from trinity.trainer.engine.gradients import FiniteStepGuard, Fp32GradAccumulator, OneRankUpdate
from trinity.trainer.engine.optimizers import Muon, make_optimizer
from trinity.trainer.engine.slices import SlicedState, Write, all_fragments, clear_state
from trinity.trainer.model.fused import wants_kernels
from trinity.trainer.process.exchange import Together
from trinity.weights.checkpoint_slices import FOLDER
from trinity.weights.safe_load import load_safely

_TAG = "deepspeed"  # folder of older checkpoints
_BUCKET_ELEMENTS = 100_000_000  # gradients in flight; DeepSpeed's default takes 2 GB of the GPU in float32


class DeepSpeedModel:
    """A module, its optimizer, and the sharding of both over the ranks.

    Backward passes only accumulate (managed_gradient_accumulation is off), in float32 for every dtype of the
    parameters; `step` reduces over ranks and updates.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerConfig,
        trainer: TrainerConfig,
        dtype: torch.dtype,
        device: torch.device,
        grad_clip: float,
        together: Together = contextlib.nullcontext,
    ) -> None:
        """together: as of `Exchange`."""
        self.zero_stage = trainer.deepspeed.zero_stage
        self.optimizer = make_optimizer(module, optimizer, device, _offloads(trainer, device))
        deepspeed = import_deepspeed(device)
        config = deepspeed_config(trainer, dtype, device, grad_clip)
        with together("the preparation of the optimizer"):
            self.engine, *_ = deepspeed.initialize(model=module, optimizer=self.optimizer, config=config)
        self.engine.checkpoint_engine.load = load_state
        self._finite_guard = FiniteStepGuard(self.optimizer, self.engine)
        self._fp32_grads = Fp32GradAccumulator(module.parameters() if self.zero_stage < 2 else ())
        self._one_rank: OneRankUpdate | None = None
        if isinstance(self.optimizer, Muon):
            shared = self.zero_stage > 0 and self.engine.world_size > 1
            fragments = all_fragments(self.engine, self.optimizer, self.zero_stage)
            self.optimizer.place(fragments, self.engine.world_size, has_parts=shared)
        one_rank = self.zero_stage == 2 and self.engine.world_size == 1 and not _offloads(trainer, device)
        one_rank = one_rank and optimizer.optimizer_type == "adamw"
        if one_rank and (device.type == "cpu" or wants_kernels(module, trainer.fused_kernels)):
            self._one_rank = OneRankUpdate(self.engine.optimizer, self.optimizer, grad_clip, self._finite_guard)
        kind = optimizer.optimizer_type
        self._state = SlicedState(self.engine, self.optimizer, kind, self.zero_stage, dtype, device, together)
        self._deepspeed = deepspeed
        self._accumulated = False
        if self.zero_stage == 0 and dtype is torch.float32:
            _report_grad_norm(self.engine)

    @property
    def module(self) -> Any:
        return self.engine.module

    def __call__(self, *args: Any) -> Any:
        return self.engine(*args)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulates the gradient of a share of the batch's loss. DeepSpeed averages over ranks; shares add up."""
        self._accumulated = True
        self.engine.backward(loss * self.engine.world_size, scale_wrt_gas=False)
        self._fp32_grads.accumulate()

    def step(self, rate: float, sound: torch.Tensor | bool = True) -> float | None:
        """Updates with the accumulated gradient, at this learning rate; returns its norm before clipping.

        If the norm is not finite, or `sound` is false, no weight changes.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._accumulated = False
        self._fp32_grads.write_back()
        self._finite_guard.sound = sound
        self.engine.step()
        norm = self._finite_guard.norm
        return None if norm is None else float(norm)

    def drop(self) -> None:
        """Discards the accumulated gradients."""
        self._finite_guard.closed = True
        self._accumulated = False
        self._fp32_grads.write_back()
        try:
            self.engine.step()
        finally:
            self._finite_guard.closed = False

    def abandon(self) -> None:
        """Discards the accumulated gradients after an error within a forward or backward pass.

        DeepSpeed expects the end of each backward pass that it began. ZeRO 2 and 3 reduce gradients as they arrive: to
        reduce the pending ones resets their record of gradients already seen. ZeRO 1 has no such record.
        """
        sharded = self.engine.optimizer
        if getattr(sharded, "_backward_active_depth", 0):
            sharded._backward_active_depth = 0
            if self.zero_stage >= 2 and self._one_rank is None:
                sharded.independent_gradient_partition_epilogue()
        for parameter in self.module.parameters():
            parameter.grad = None
        self._fp32_grads.clear()
        if self._one_rank is not None:
            self._one_rank.drop()
        if self.zero_stage == 3:
            sharded.empty_partition_cache()  # parameters still gathered
        if self.zero_stage == 1:
            sharded.zero_grad()
        elif self.zero_stage == 0 or self._accumulated:
            self.drop()

    def gathered(self, parameters: list[Any], changed_by: int | None) -> Any:
        """Gathers whole parameters on every rank under ZeRO-3; changes by rank `changed_by` persist."""
        return self._deepspeed.zero.GatheredParameters(parameters, modifier_rank=changed_by)

    def forget(self) -> None:
        """Copies replaced parameters to the float32 masters and resets the optimizer."""
        refresh = getattr(self.engine.optimizer, "refresh_fp32_params", None)
        if refresh is not None:
            refresh()
        clear_state(self.optimizer)

    def reserve(self) -> Callable[[], None]:
        """Returns a function that allocates the memory of `snapshot`, for another thread. A collective."""
        return self._state.reserve()

    def snapshot(self, folder: Path, state: dict[str, Any]) -> Write:
        """Copies this rank's slices of weights and optimizer, without frozen parameters (LoRA's base).

        Returns a function that writes the copy to `folder` and returns the paths.
        """
        return self._state.snapshot(folder / FOLDER, state)

    def load(self, folder: Path) -> dict[str, Any]:
        """Loads what `snapshot` wrote on ranks of any number and ZeRO stage; returns its state. A collective.

        Shards that DeepSpeed wrote, as former versions let it, need the same ranks and stage.
        """
        if (folder / FOLDER).is_dir():
            return self._state.load(folder / FOLDER)
        whole = all(parameter.requires_grad for parameter in self.module.parameters())
        path, state = self.engine.load_checkpoint(str(folder), tag=_TAG, load_module_strict=whole)
        if path is None:
            raise FileNotFoundError(f"{folder} holds no DeepSpeed checkpoint")
        return dict(state)


def load_state(path: str, map_location: Any = None) -> dict[str, Any]:
    """Reads a shard for DeepSpeed's load_checkpoint without running code in it, as unpickling would.

    Raises InvalidInput if it holds anything but tensors, plain containers and the classes below.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return load_safely(Path(path), (ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address), mapped=False)


def dtype_of(trainer: TrainerConfig, device: torch.device) -> torch.dtype:
    """The type of the parameters: as configured, by default bfloat16 on GPUs and float32 on CPUs."""
    choice = trainer.deepspeed.dtype
    in_bfloat16 = choice == "bfloat16" or (choice == "auto" and device.type == "cuda")
    return torch.bfloat16 if in_bfloat16 else torch.float32


def import_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed for this device."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("WARNING")
    if device.type == "cpu":
        # Disables a shared-memory all-reduce that is compiled on first use (40 s); gloo is as fast at these sizes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _offloads(trainer: TrainerConfig, device: torch.device) -> bool:
    """Returns True if the optimizer is offloaded; on CPUs it is in host memory already."""
    return trainer.deepspeed.offload_optimizer and device.type == "cuda"


def deepspeed_config(
    trainer: TrainerConfig, dtype: torch.dtype, device: torch.device, grad_clip: float
) -> dict[str, Any]:
    """Configuration of `deepspeed.initialize`. DeepSpeed does not see micro-batches: see DeepSpeedModel."""
    zero: dict[str, Any] = {"stage": trainer.deepspeed.zero_stage, "reduce_bucket_size": _BUCKET_ELEMENTS}
    if _offloads(trainer, device):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if trainer.deepspeed.offload_param:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": grad_clip,
        # FiniteStepGuard finds a non-finite gradient by its norm; DeepSpeed would check each parameter's.
        "bf16": {"enabled": dtype is torch.bfloat16, "check_grad_overflow": False},
        # ZeRO 0 and 1 refuse fp32, or use another optimizer: see Fp32GradAccumulator.
        "data_types": {"grad_accum_dtype": "fp32" if trainer.deepspeed.zero_stage >= 2 else None},
        "steps_per_print": 10**9,
    }


def _report_grad_norm(engine: Any) -> None:
    """Keeps the norm, which plain float32 without ZeRO discards after clipping."""
    from deepspeed.runtime.utils import clip_grad_norm_

    def clip() -> None:
        norm = clip_grad_norm_(engine.module.parameters(), max_norm=engine.gradient_clipping(), mpu=engine.mpu)
        engine._global_grad_norm = float(norm)

    engine.clip_fp32_gradients = clip
