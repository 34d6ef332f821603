"""Versions of gpt-oss, whose experts and sinks vLLM copies into the parameters without their loaders.

vLLM's layerwise reload puts parameters on the meta device and counts calls of their loaders, so it would lose these
copies and keep the old weights. Here host memory holds these parameters while a version is read.
"""

from collections.abc import Iterator

import torch


def hold(model: torch.nn.Module) -> None:
    """Gives the parameters memory. Call after vLLM's initialize_layerwise_reload."""
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

    for layer in _layers(model):
        for name, tensor in layer.named_parameters(recurse=False):
            with torch.device("cpu"):
                setattr(layer, name, materialize_meta_tensor(tensor))


def process(model: torch.nn.Module, device: torch.device) -> None:
    """Makes the engine's weights of the parameters. Call before vLLM's finalize_layerwise_reload."""
    from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info

    for layer in _layers(model):
        for _, tensor in layer.named_parameters(recurse=False):
            tensor.data = tensor.data.to(device)
        _layerwise_process(layer, get_layerwise_info(layer))


def _layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    if type(model).__name__ == "GptOssForCausalLM":
        yield from (layer for layer in model.modules() if {"sinks", "w13_weight"} & set(layer._parameters))
