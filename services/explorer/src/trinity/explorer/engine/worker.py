"""What runs inside vLLM's worker processes: how new weights get into the model.

vLLM imports this module by `worker_extension_cls`, which is what registers the transfer engine there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

BACKEND = "trinity"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on before the first update."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One update: safetensors files on a local disk, and the tensors in the order of the model's layers."""

    files: list[str] = field(default_factory=list)
    # (tensor name, index in `files`)
    tensors: list[tuple[str, int]] = field(default_factory=list)


class TrinityTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads checkpoint-format weights through vLLM's layerwise reload."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        return

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        model: Any = self.model
        model.load_weights(_read(update_info))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_tied_heads(self.model)

    def shutdown(self) -> None:
        return

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        raise RuntimeError("Trinity's trainer publishes through the sync service")


def _read(update: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
    files = [safe_open(path, framework="pt") for path in update.files]
    for name, index in update.tensors:
        yield name, files[index].get_tensor(name)


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Rebuild the packed copy an output head on a CPU computes with.

    A head tied to the input embedding has no weight of its own in the checkpoint, so vLLM's reload passes it over and
    it would go on with the old weights, without an error.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = {id(m.weight) for m in model.modules() if type(m) is VocabParallelEmbedding}
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and id(module.weight) in embeddings:
            quantization: Any = module.quant_method
            quantization.process_weights_after_loading(module)


class WorkerExtension:
    """Mixed into vLLM's worker. Its module is what matters."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, TrinityTransferEngine)
