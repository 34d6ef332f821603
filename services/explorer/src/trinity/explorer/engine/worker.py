"""Loads new weights into the model, inside vLLM's worker processes.

vLLM imports this module by `worker_extension_cls`; the import registers the transfer engine.
"""

import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, cast

import torch
from safetensors import safe_open
from vllm import envs
from vllm.config.load import LoadConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from trinity.config.checks.lora import in_four_bits
from trinity.explorer.engine import gpt_oss, routes, sampled_logprobs
from trinity.explorer.engine.replay import Loader
from trinity.explorer.engine.staging import Named, Staging, find
from trinity.explorer.types import FOUR_BIT
from trinity.weights.collective import Group, GroupBroken, Store, receive_buckets
from trinity.weights.four_bit import rounded_base
from trinity.weights.lora import Lora, merged
from trinity.weights.manifest import TensorInfo

BACKEND = "trinity"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """A collective group to enter, in place of the previous one. Fields as in sync.v1.Epoch."""

    epoch: int
    backend: str
    store_address: str
    store_secret: str = field(repr=False)
    first_rank: int  # of this engine's workers
    world_size: int
    timeout_seconds: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One update: by safetensors files on a local disk, or (`epoch` > 0) as rank 0 of a collective group sends it."""

    files: list[str] = field(default_factory=list)
    # In the order of the model's layers. Of files: (name, index in `files`); of a group: (name, dtype, shape, bytes).
    tensors: list[list[Any]] = field(default_factory=list)
    epoch: int = 0
    bucket_bytes: int = 0
    # Only for adapters: the base model's files and tensors, as above, and Lora.plain().
    base_files: list[str] = field(default_factory=list)
    base_tensors: list[list[Any]] = field(default_factory=list)
    lora: dict[str, Any] = field(default_factory=dict)


class TrinityTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads checkpoint-format weights: into the parameters as they are, or through vLLM's layerwise reload."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    _membership: "Membership | None" = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Begin to enter a group. Generation continues meanwhile."""
        if self._membership is not None:
            self._membership.close()
        self._membership = Membership(init_info, self.vllm_config.parallel_config.rank, self.device)

    @cached_property
    def in_place(self) -> bool:
        return loads_in_place(self.model, self.device)

    @cached_property
    def _loader(self) -> Loader:
        return Loader(self.model)

    @cached_property
    def _staging(self) -> Staging:
        return Staging(self.device)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if not self.in_place:
            initialize_layerwise_reload(self.model)
            gpt_oss.hold(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        model: Any = self.model
        try:
            if self.in_place and not (update_info.base_files or self._in_four_bits):
                layout, coming = self._version(update_info)
                with closing(coming) as buckets:
                    self._loader.load(layout, buckets)
            else:
                with closing(self._tensors(update_info)) as tensors:
                    model.load_weights(tensors)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Reset after a failed load, ready for the next one. The model is a mixture of two versions now."""
        if not self.in_place:
            _abandon_reload(self.model, self.model_config)

    def _version(self, update: UpdateInfo) -> tuple[list[TensorInfo], Generator[list[Named]]]:
        """The layout of a whole model's version, then its tensors, a bucket at a time, from files or a group."""
        if update.epoch:
            return _infos(update), self._received(update)
        found = find(update.files, update.tensors)
        return [tensor.info for tensor in found], self._staging.read(found)

    def _tensors(self, update: UpdateInfo) -> Generator[Named]:
        """All tensors of the model, merged with adapters if the version has them."""
        with closing(self._given(update)) as given:
            if not update.base_files:
                yield from self._rounded(given)  # in four bits: the base itself
                return
            adapters = {name: tensor.clone() for name, tensor in given}  # a bucket is larger than they are
        with closing(self._read(update.base_files, update.base_tensors)) as base:
            yield from merged(self._rounded(base), adapters, Lora.of(update.lora), self.device)

    @property
    def _in_four_bits(self) -> bool:
        return self.vllm_config.load_config.load_format == FOUR_BIT

    def _rounded(self, base: Iterator[Named]) -> Iterator[Named]:
        """The base model's tensors, with the values of NF4 if the trainer computes with these."""
        if not self._in_four_bits:
            return base
        model: Any = self.vllm_config.model_config
        return rounded_base(base, in_four_bits, model.dtype, self.device)

    def _given(self, update: UpdateInfo) -> Generator[Named]:
        """The version's tensors by name, from files or from the group."""
        if not update.epoch:
            return self._read(update.files, update.tensors)
        return _one_by_one(self._received(update))

    def _read(self, paths: list[str], tensors: list[list[Any]]) -> Generator[Named]:
        if self.device.type == "cpu":
            return _read(paths, tensors)
        return _one_by_one(self._staging.read(find(paths, tensors)))

    def _received(self, update: UpdateInfo) -> Generator[list[Named]]:
        """A bucket at a time."""
        if self._membership is None:
            raise GroupBroken(f"this worker is in no collective group; epoch {update.epoch} is needed")
        coming = receive_buckets(self._membership.group(update.epoch), _infos(update), update.bucket_bytes)
        return cast(Generator[list[Named]], coming)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self.in_place:
            return
        gpt_oss.process(self.model, self.device)
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_tied_heads(self.model)

    def shutdown(self) -> None:
        if self._membership is not None:
            self._membership.close()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        raise RuntimeError("Trinity's trainer publishes through the sync service")


class FourBitLoader(DefaultModelLoader):
    """Loads the model with which an engine begins with the values of NF4."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Generator[Named]:
        base = super().get_all_weights(model_config, model)
        yield from rounded_base(base, in_four_bits, model_config.dtype, current_platform.device_type)


class Membership:
    """This worker's part in one epoch, entered in a thread, because entering blocks until all have entered."""

    def __init__(self, info: InitInfo, rank: int, device: torch.device) -> None:
        self._info, self._rank, self._device = info, info.first_rank + rank, device
        self._group: Group | None = None
        self._failure = ""
        self._thread = threading.Thread(target=self._enter, daemon=True, name=f"epoch-{info.epoch}")
        self._thread.start()

    def _enter(self) -> None:
        info = self._info
        try:
            store = Store.connect(info.store_address, info.store_secret, info.timeout_seconds)
            self._group = Group(
                store, info.epoch, info.backend, self._rank, info.world_size, self._device, info.timeout_seconds
            )
        except Exception as error:  # raised when the group is used
            self._failure = f"{type(error).__name__}: {error}"

    def group(self, epoch: int) -> Group:
        """The group, once all have entered. GroupBroken if it failed to form or has another epoch."""
        self._thread.join(self._info.timeout_seconds)
        if self._info.epoch != epoch or self._group is None:
            raise GroupBroken(f"epoch {epoch} is needed, this worker is in {self._info.epoch}; {self._failure}")
        return self._group

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


def loads_in_place(model: torch.nn.Module, device: torch.device) -> bool:
    """True if the forward pass uses the checkpoint's parameters, only fused and sliced.

    Then a weight is copied over the old one, at the address that CUDA graphs read. The layerwise reload rebuilds every
    layer and takes 0.1 s longer, even for a small model.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, type(None))
    methods = {type(getattr(module, "quant_method", None)) for module in model.modules()}
    latent = any("MLA" in type(module).__name__ for module in model.modules())  # absorbs weights into others
    return device.type == "cuda" and methods <= set(plain) and not latent


def _abandon_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Give layers with a part of their new weights the old ones back.

    Otherwise vLLM keeps its count and takes a later load's weights for the missing ones. The model is a mixture of two
    versions, so a full load must follow.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()
    finalize_layerwise_reload(model, model_config)


def _infos(update: UpdateInfo) -> list[TensorInfo]:
    """Layout of the tensors that a group sends."""
    return [TensorInfo(name, dtype, tuple(shape), size, "") for name, dtype, shape, size in update.tensors]


def _one_by_one(buckets: Generator[list[Named]]) -> Generator[Named]:
    with closing(buckets):
        yield from chain.from_iterable(buckets)


def _read(paths: list[str], tensors: list[list[Any]]) -> Generator[Named]:
    files = [safe_open(path, framework="pt") for path in paths]
    for name, index in tensors:
        yield name, files[index].get_tensor(name)


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Rebuild the packed copy of a tied output head on a CPU.

    A head tied to the input embedding has no weight in the checkpoint, so vLLM's reload skips it, and the head would
    silently keep the old weights.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = {id(m.weight) for m in model.modules() if type(m) is VocabParallelEmbedding}
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and id(module.weight) in embeddings:
            quantization: Any = module.quant_method
            quantization.process_weights_after_loading(module)


class WorkerExtension:
    """Mixed into vLLM's worker."""

    def load_version(self: Any, update_info: dict[str, Any]) -> None:
        """Load an update in one call from the engine core instead of three. `update_info`: fields of UpdateInfo."""
        self.start_weight_update()
        self.update_weights(update_info)
        self.finish_weight_update()

    def abandon_weight_update(self: Any) -> None:
        """Reset after an update that failed on some worker, ready for the next one."""
        if self._weight_update_active:
            engine = self.weight_transfer_engine
            engine.abandon()
            engine.reset_weight_update_target()
            self._weight_update_active = False

    def read_adapter(self: Any, name: str, number: int, folder: str) -> None:
        """Begin to read an adapter into pinned memory, in a thread. `add_lora` takes what was read, or its error."""
        from vllm.lora.request import LoRARequest

        manager = self.model_runner.lora_manager
        read = type(manager)._load_adapter
        reading = ThreadPoolExecutor(1, "adapter").submit(read, manager, LoRARequest(name, number, folder))

        def taken(request: LoRARequest) -> Any:
            if request.lora_int_id != number:
                return read(manager, request)
            del manager._load_adapter
            self._reading_adapter = None
            return reading.result()

        manager._load_adapter = taken
        self._reading_adapter = reading

    def adapter_is_read(self: Any) -> bool:
        """True once `add_lora` has to wait for nothing."""
        return bool(self._reading_adapter.done())


def norm_row_by_row() -> None:
    """Make vLLM's batch-invariant RMSNorm add a residual [B, H] by torch, and normalise by the kernel without one.

    Its kernel with a residual has other blocks from 256 tokens on, and so another order of summation, up to vLLM 0.26:
    https://github.com/vllm-project/vllm/pull/48391
    """
    from vllm.model_executor.layers import layernorm

    of_rows: Any = layernorm.rms_norm_batch_invariant

    def rms_norm(
        input: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6, residual: torch.Tensor | None = None
    ) -> Any:
        if residual is None:
            return of_rows(input, weight, eps)
        residual = input + residual
        return of_rows(residual, weight, eps), residual

    layernorm.rms_norm_batch_invariant = rms_norm


def repack_experts() -> None:
    """Make vLLM pack experts for its CPU kernel at every load.

    Up to vLLM 0.32 it does so at the first load only, and then reads new weights in a layout that they do not have.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method: Any = UnquantizedFusedMoEMethod
    process = method.process_weights_after_loading

    def repacking(self: Any, layer: torch.nn.Module) -> None:
        packed = self.moe_kernel is not None
        process(self, layer)
        if packed:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method.process_weights_after_loading = repacking


register_model_loader(FOUR_BIT)(FourBitLoader)
sampled_logprobs.install()
if current_platform.is_cpu():
    from trinity.explorer.engine import cpu_adapters

    repack_experts()
    routes.install()
    cpu_adapters.install()
if envs.VLLM_BATCH_INVARIANT:
    norm_row_by_row()
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, TrinityTransferEngine)
