"""Reads and writes whole tensors of a trained model in layer order, under every sharding."""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from trinity.config import Plan
from trinity.config.checks.lora import in_four_bits
from trinity.config.schema.model import ModelConfig
from trinity.runtime.errors import InvalidInput
from trinity.trainer.engine.deepspeed import DeepSpeedModel
from trinity.trainer.model.file_parts import FileParts
from trinity.trainer.model.lora import given_adapters
from trinity.trainer.model.policy import PolicyModel, load_policy
from trinity.trainer.process.ranks import Ranks
from trinity.trainer.weights.shards import Weights, describe
from trinity.weights.collective import plan_buckets
from trinity.weights.four_bit import rounded_base
from trinity.weights.lora import merged
from trinity.weights.manifest import TensorInfo

Named = tuple[str, torch.Tensor]
_ALIGNMENT = 16  # bytes: a shard of any dtype can be cut out where it begins


class PolicyWeights:
    """The weights that versions hold: the policy's, or with LoRA the adapters.

    All methods but `base` are collectives under ZeRO-3.
    """

    def __init__(
        self, model: DeepSpeedModel, plan: Plan, ranks: Ranks, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model = model
        self._plan = plan
        self._ranks = ranks
        self._dtype = dtype
        self._device = device
        self._parts = FileParts(model.module.model)

    def layout(self) -> list[TensorInfo]:
        """Names, dtypes and shapes of `read`, in the same order."""
        return [
            describe(part.name, parameter.dtype, part.shape)
            for name, parameter in self._model.module.weights()
            for part in self._parts.of(name, _shape(parameter))
        ]

    @torch.no_grad()
    def read(self) -> Iterator[Named]:
        """Yields whole tensors by checkpoint name. A tensor is valid until the next one is requested."""
        if self._model.zero_stage == 3:
            weights: Iterable[Named] = gathered(self._buckets(self._bucket_bytes // 2), self._device)  # two at a time
        else:
            weights = ((name, parameter.data) for name, parameter in self._model.module.weights())
        for name, tensor in weights:
            yield from self._parts.cut(name, tensor)

    @torch.no_grad()
    def load(self, weights: Weights | None) -> None:
        """Loads rank 0's weights on every rank and resets the optimizer. The inverse of `read`."""
        given = iter(weights or ())
        for bucket in self._buckets(self._bucket_bytes):
            with self._whole(bucket):
                for name, parameter in bucket:
                    if self._ranks.is_first:
                        for part, tensor in self._parts.cut(name, parameter.data):
                            tensor.copy_(_expected(part, tensor, *next(given, ("nothing", torch.empty(0)))))
                    if self._model.zero_stage != 3 and self._ranks.world_size > 1:
                        dist.broadcast(parameter.data, src=0)
        self._model.forget()

    def base(self) -> Iterator[Named]:
        """The run's initial weights, for `load` on rank 0."""
        for name, parameter in self._begun_with(self._plan.config.model).weights():
            yield from self._parts.cut(name, parameter.data)

    def given(self) -> list[Named]:
        """The adapters with which the run begins, if they come from a folder; else an empty list."""
        lora = self._plan.config.model.lora
        given = given_adapters(lora, self._dtype) if lora is not None else {}
        return [(tensor.name, given[tensor.name]) for tensor in self.layout()] if given else []

    def whole(self) -> tuple[Sequence[TensorInfo], Iterator[Named]]:
        """Layout and tensors of a whole model with its buffers; LoRA adapters are merged into the base model.

        Rank 0 calls it in place of `read`. Versions have no buffers: an engine keeps those of the base model's files.
        """
        model: PolicyModel = self._model.module
        layout, weights, lora = self.layout(), self.read(), model.lora
        if lora is not None:
            adapters = {name: tensor.clone() for name, tensor in weights}
            model = self._begun_with(self._plan.config.model.model_copy(update={"lora_configs": None}))
            cut = FileParts(model.model).cut
            base = {part: tensor for name, parameter in model.weights() for part, tensor in cut(name, parameter.data)}
            layout = [describe(name, tensor.dtype, tensor.shape) for name, tensor in base.items()]
            tensors: Iterable[Named] = base.items()
            if self._plan.config.model.in_four_bits:
                tensors = rounded_base(tensors, in_four_bits, self._dtype, self._device)
            found = merged(tensors, adapters, lora, self._device)
            weights = ((name, tensor.to(self._dtype)) for name, tensor in found)
        fixed = sorted(model.fixed(), key=lambda named: str(named[1].dtype))  # a file has one dtype
        buffers = [describe(name, buffer.dtype, buffer.shape) for name, buffer in fixed]
        return [*layout, *buffers], chain(weights, fixed)

    def _begun_with(self, model: ModelConfig) -> PolicyModel:
        return load_policy(model, self._dtype, 1)

    @property
    def _bucket_bytes(self) -> int:
        return self._plan.config.synchronizer.bucket_mib * 1024**2

    def _buckets(self, size_bytes: int) -> Iterator[list[tuple[str, Any]]]:
        """Yields lists of parameters that are gathered together under ZeRO-3."""
        of_name = dict(self._model.module.weights())
        layout = [describe(name, parameter.dtype, _shape(parameter)) for name, parameter in of_name.items()]
        for bucket in plan_buckets(layout, size_bytes):
            yield [(slot.tensor.name, of_name[slot.tensor.name]) for slot in bucket.slots]

    def _whole(self, bucket: list[tuple[str, Any]]) -> Any:
        """Gathers the parameters as a context; rank 0's changes persist."""
        if self._model.zero_stage != 3:
            return contextlib.nullcontext()
        return self._model.gathered([parameter for _, parameter in bucket], 0)


def _shape(parameter: Any) -> tuple[int, ...]:
    """Returns the shape of a whole parameter, also under ZeRO-3."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _expected(name: str, parameter: Any, given: str, tensor: torch.Tensor) -> torch.Tensor:
    if (given, tensor.shape) != (name, parameter.shape):
        raise InvalidInput(
            "weights",
            f"expected {name} {list(parameter.shape)}, got {given} {list(tensor.shape)} of another model",
        )
    return tensor


def read_all(weights: Weights) -> None:
    """Iterates to the end: to read sharded weights is a collective."""
    for _ in weights:
        pass


def gathered(buckets: Iterable[list[tuple[str, Any]]], device: torch.device) -> Iterator[Named]:
    """Yields the whole tensors of each bucket's parameters, in order. A collective: every rank must iterate to the end.

    Each bucket takes one collective, which runs one bucket ahead: two buckets are in memory, and a tensor. Tensors that
    are already whole are yielded unchanged. GatheredParameters would run a collective for each parameter, wait for all
    of them, and free persistent parameters. Here the ranks' shards (`ds_tensor`: a flat, padded parameter, cut into
    equal parts, one for each rank) are packed, gathered and cut out again; DeepSpeed's parameters stay unchanged.
    """
    coming: deque[_Gathering] = deque()
    for bucket in buckets:
        coming.append(_Gathering(bucket, device))
        if len(coming) == 2:
            yield from coming.popleft().tensors()  # no reference here keeps its memory
    while coming:
        yield from coming.popleft().tensors()


class _Gathering:
    """A bucket whose collective begins in the constructor."""

    def __init__(self, bucket: list[tuple[str, Any]], device: torch.device) -> None:
        self._bucket = [(name, parameter, _here(parameter, device)) for name, parameter in bucket]
        self._work: Any = None
        away = [parameter for _, parameter, here in self._bucket if here is None]
        if away:
            (group,) = {parameter.ds_process_group for parameter in away}
            packed = _packed([parameter.ds_tensor for parameter in away], device)
            flat = packed.new_empty(dist.get_world_size(group) * len(packed))
            self._work = dist.all_gather_into_tensor(flat, packed, group=group, async_op=True)
            self._of_ranks = flat.view(-1, len(packed))
            self._packed = packed  # the collective reads it until `wait`

    def tensors(self) -> Iterator[Named]:
        if self._work is not None:
            self._work.wait()
            del self._packed
        begin = 0
        for name, parameter, here in self._bucket:
            if here is None:
                size = parameter.ds_tensor.nbytes
                flat = self._of_ranks[:, begin : begin + size].reshape(-1).view(parameter.ds_tensor.dtype)
                here = flat[: parameter.ds_numel].view(parameter.ds_shape)
                begin += _aligned(size)
            yield name, here


def _here(parameter: Any, device: torch.device) -> torch.Tensor | None:
    """Returns the whole parameter if this rank has it: it persists, was never sharded, or there is no other rank."""
    if not hasattr(parameter, "ds_tensor") or parameter.ds_status.name == "AVAILABLE":
        whole: torch.Tensor = parameter.data
        return whole
    if dist.get_world_size(parameter.ds_process_group) > 1:
        return None
    flat: torch.Tensor = parameter.ds_tensor.to(device)
    return flat[: parameter.ds_numel].view(parameter.ds_shape)


def _packed(shards: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns the shards' bytes in order, each aligned."""
    packed = torch.empty(sum(_aligned(shard.nbytes) for shard in shards), dtype=torch.uint8, device=device)
    begin, targets = 0, []
    for shard in shards:
        targets.append(packed[begin : begin + shard.nbytes])
        begin += _aligned(shard.nbytes)
    torch._foreach_copy_(targets, [shard.view(torch.uint8) for shard in shards])
    return packed


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
