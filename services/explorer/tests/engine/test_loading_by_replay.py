"""Loading again by the copies of the first time gives what the model's own `load_weights` gives, bit for bit, or is not
done at all. The models are vLLM's, as one process and as one of two tensor-parallel ones."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2Config

from trinity.explorer.engine.replay import Loader

pytestmark = pytest.mark.core

Weights = dict[str, torch.Tensor]
SIZES = {"vocab_size": 130, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    Qwen2Config(**SIZES, tie_word_embeddings=request.param, architectures=["Qwen2ForCausalLM"]).save_pretrained(made)
    return made


@pytest.fixture(params=[1, 2], ids=["one process", "one of two"])
def make(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Makes vLLM's model of the folder, without weights."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64)
    config: VllmConfig = arguments.create_engine_config()
    with set_current_vllm_config(config):
        address = f"file://{tmp_path}/group"
        parallel.init_distributed_environment(1, 0, address, 0, backend="gloo")
        parallel.initialize_model_parallel(1, 1)
        parallel.get_tp_group().world_size = request.param
        parallel.get_tp_group().rank_in_group = request.param - 1
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)

        def model() -> nn.Module:
            config.compilation_config.static_forward_context.clear()
            return zeroed(Qwen2ForCausalLM(vllm_config=config))

        try:
            yield model
        finally:
            torch.set_default_dtype(before)
            parallel.get_tp_group().world_size = 1
            parallel.get_tp_group().rank_in_group = 0
            parallel.destroy_model_parallel()
            parallel.destroy_distributed_environment()


def zeroed(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.data.zero_()
    return model


def checkpoint(folder: Path, seed: int) -> Weights:
    from transformers import AutoModelForCausalLM

    config = Qwen2Config.from_pretrained(folder)
    policy = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(torch.bfloat16)
        for name, parameter in policy.named_parameters()
    }


def layout_of(weights: Weights) -> list[list[Any]]:
    return [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in weights.items()]


def buckets_of(weights: Weights, most: int = 5) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """As they come: parts of one buffer, whose memory is other tensors' afterwards."""
    items = list(weights.items())
    for start in range(0, len(items), most):
        buffer = torch.cat([tensor.reshape(-1) for _, tensor in items[start : start + most]])
        parts = buffer.split([tensor.numel() for _, tensor in items[start : start + most]])
        named = zip(items[start : start + most], parts, strict=True)
        yield [(name, part.view(tensor.shape)) for (name, tensor), part in named]
        buffer.zero_()


def load(loader: Loader, weights: Weights) -> None:
    loader.load(layout_of(weights), buckets_of(weights))


def expect(model: nn.Module, other: nn.Module) -> None:
    for (name, found), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(found, expected), name


class Calls:
    """How often the model has loaded by itself."""

    def __init__(self, model: Any) -> None:
        self.count, self._load = 0, model.load_weights
        model.load_weights = self

    def __call__(self, weights: Any) -> Any:
        self.count += 1
        return self._load(weights)


def test_the_second_version_is_loaded_as_the_model_would(make: Callable[[], Any], folder: Path) -> None:
    model, other = make(), make()
    loader, calls = Loader(model), Calls(model)
    for seed in (1, 2, 3):
        weights = checkpoint(folder, seed)
        load(loader, weights)
        other.load_weights(weights.items())
        expect(model, other)
        assert any(parameter.any() for parameter in model.parameters())
    assert calls.count == 1


def test_another_layout_or_replaced_parameters_are_loaded_by_the_model(make: Callable[[], Any], folder: Path) -> None:
    model, other = make(), make()
    loader, calls = Loader(model), Calls(model)
    load(loader, checkpoint(folder, 1))
    turned = dict(reversed(checkpoint(folder, 2).items()))
    load(loader, turned)
    assert calls.count == 2
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.data.clone())
    last = dict(reversed(checkpoint(folder, 3).items()))
    load(loader, last)
    assert calls.count == 3
    other.load_weights(last.items())
    expect(model, other)


def test_a_failed_load_records_no_copies(make: Callable[[], Any], folder: Path) -> None:
    model, other = make(), make()
    loader, calls = Loader(model), Calls(model)
    weights = checkpoint(folder, 1)

    def broken() -> Iterator[list[tuple[str, torch.Tensor]]]:
        yield next(buckets_of(weights))
        raise ConnectionError("gone")

    for _ in range(2):
        with pytest.raises(ConnectionError):
            loader.load(layout_of(weights), broken())
    load(loader, weights)
    assert calls.count == 3
    with pytest.raises(ConnectionError):  # while it replays
        loader.load(layout_of(weights), broken())
    load(loader, checkpoint(folder, 2))
    assert calls.count == 3
    other.load_weights(checkpoint(folder, 2).items())
    expect(model, other)


class Odd(nn.Module):
    """Loads `a`, of 4, in one way or another."""

    def __init__(self, how: Callable[["Odd", torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.kept: list[torch.Tensor] = []
        self._how = how

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            self._how(self, tensor)


def doubled(model: Odd, tensor: torch.Tensor) -> None:
    model.weight.data.copy_(tensor * 2)


def added(model: Odd, tensor: torch.Tensor) -> None:
    model.weight.data.zero_()
    model.weight.data.add_(tensor)


def twice(model: Odd, tensor: torch.Tensor) -> None:
    model.weight.data.copy_(tensor)
    model.weight.data[1:3].copy_(tensor[:2])


def scattered(model: Odd, tensor: torch.Tensor) -> None:
    model.weight.data[::2].copy_(tensor[::2])


def by_value(model: Odd, tensor: torch.Tensor) -> None:
    model.weight.data.fill_(tensor[0].item())


def replaced(model: Odd, tensor: torch.Tensor) -> None:
    model.weight = nn.Parameter(tensor.clone())


def through_another(model: Odd, tensor: torch.Tensor) -> None:
    model.kept.append(torch.empty(4).copy_(tensor))
    model.weight.data.copy_(model.kept[-1])


@pytest.mark.parametrize("how", [doubled, added, twice, scattered, by_value, replaced, through_another])
def test_a_model_that_does_more_than_copy_is_left_to_itself(how: Callable[[Odd, torch.Tensor], None]) -> None:
    model, other = Odd(how), Odd(how)
    loader, calls = Loader(model), Calls(model)
    for value in (1.0, 2.0, 3.0):
        weights = {"a": torch.arange(4.0) + value}
        load(loader, weights)
        other.load_weights(weights.items())
        expect(model, other)
    assert calls.count == 3


def test_slices_conversions_and_fills_beside_them_are_copies() -> None:
    def how(model: Odd, tensor: torch.Tensor) -> None:
        model.weight.data[:2].copy_(tensor[2:, None].T[0])
        model.weight.data[2:].fill_(7)

    model = Odd(how)
    loader, calls = Loader(model), Calls(model)
    for value in (1.0, 2.0):
        load(loader, {"a": (torch.arange(4.0) + value).to(torch.bfloat16)})
        assert model.weight.tolist() == [value + 2, value + 3, 7, 7]
    assert calls.count == 1
