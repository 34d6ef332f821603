"""Reads and writes the weights of a trained model: whole tensors in layer order, under every sharding."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trinity.config import Plan
from trinity.config.schema.model import ModelConfig
from trinity.runtime.errors import InvalidInput
from trinity.trainer.engine.deepspeed import DeepSpeedModel
from trinity.trainer.engine.gathering import gathered
from trinity.trainer.model.policy import PolicyModel, load_policy
from trinity.trainer.ranks import Ranks
from trinity.trainer.weights.shards import Weights, describe
from trinity.weights import TensorInfo
from trinity.weights.buckets import plan_buckets
from trinity.weights.lora import merged


class PolicyWeights:
    """The policy's weights as in versions: with LoRA the adapters. All but `base` are collectives under ZeRO-3."""

    def __init__(
        self, model: DeepSpeedModel, plan: Plan, ranks: Ranks, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model = model
        self._plan = plan
        self._ranks = ranks
        self._dtype = dtype
        self._device = device

    def layout(self) -> list[TensorInfo]:
        """The layout of `read`: names, dtypes and shapes, in its order."""
        policy: PolicyModel = self._model.module
        return [
            describe(name, parameter.dtype, getattr(parameter, "ds_shape", parameter.shape))
            for name, parameter in policy.weights()
        ]

    @torch.no_grad()
    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors by checkpoint name; a tensor is valid until the next one is asked for."""
        if self._model.zero_stage == 3:
            yield from gathered(self._buckets(self._bucket_bytes // 2), self._device)  # two at a time
            return
        for name, parameter in self._model.module.weights():
            yield name, parameter.data

    @torch.no_grad()
    def load(self, weights: Weights | None) -> None:
        """Inverse of `read`, from rank 0's to every rank; resets the optimizer."""
        given = iter(weights or ())
        for bucket in self._buckets(self._bucket_bytes):
            with self._whole(bucket):
                for name, parameter in bucket:
                    if self._ranks.is_first:
                        parameter.data.copy_(_expected(name, parameter, *next(given, ("nothing", torch.empty(0)))))
                    if self._model.zero_stage != 3 and self._ranks.world_size > 1:
                        dist.broadcast(parameter.data, src=0)
        self._model.forget()

    def base(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The run's initial weights, for `load`. Rank 0 alone."""
        for name, parameter in self._begun_with(self._plan.config.model).weights():
            yield name, parameter.data

    def whole(self) -> tuple[Sequence[TensorInfo], Iterator[tuple[str, torch.Tensor]]]:
        """A whole model's layout and tensors: with LoRA the base model with the adapters merged. Rank 0's `read`."""
        lora = self._model.module.lora
        if lora is None:
            return self.layout(), self.read()
        adapters = {name: tensor.clone() for name, tensor in self.read()}
        plain = self._begun_with(self._plan.config.model.model_copy(update={"lora_configs": None}))
        base = {name: parameter.data for name, parameter in plain.weights()}
        layout = [describe(name, tensor.dtype, tensor.shape) for name, tensor in base.items()]
        found = merged(base.items(), adapters, lora.scale, self._device)
        return layout, ((name, tensor.to(self._dtype)) for name, tensor in found)

    def _begun_with(self, model: ModelConfig) -> PolicyModel:
        return load_policy(model, self._dtype, 1)

    @property
    def _bucket_bytes(self) -> int:
        return self._plan.config.synchronizer.bucket_mib * 1024**2

    def _buckets(self, size_bytes: int) -> Iterator[list[tuple[str, Any]]]:
        """Parameters that are gathered together under ZeRO-3."""
        of_name = dict(self._model.module.weights())
        for bucket in plan_buckets(self.layout(), size_bytes):
            yield [(slot.tensor.name, of_name[slot.tensor.name]) for slot in bucket.slots]

    def _whole(self, bucket: list[tuple[str, Any]]) -> Any:
        """Within it the parameters are whole; rank 0's changes persist."""
        if self._model.zero_stage != 3:
            return contextlib.nullcontext()
        return self._model.gathered([parameter for _, parameter in bucket], 0)


def _expected(name: str, parameter: Any, given: str, tensor: torch.Tensor) -> torch.Tensor:
    if (given, tensor.shape) != (name, parameter.shape):
        raise InvalidInput(
            "weights", f"{name} {list(parameter.shape)} is due, {given} {list(tensor.shape)} came: another model's"
        )
    return tensor
