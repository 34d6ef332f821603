"""What the trainer section becomes for DeepSpeed."""

from typing import Any

import pytest
import torch

from trinity.config.schema.trainer import TrainerConfig
from trinity.runtime.errors import InvalidInput
from trinity.trainer.engine.deepspeed import deepspeed_config
from trinity.trainer.model.sequence_parallel import check_heads, make_groups
from trinity.trainer.process.ranks import Ranks

pytestmark = pytest.mark.core


def settings(on_gpu: bool = True, dtype: torch.dtype = torch.bfloat16, **values: Any) -> dict[str, Any]:
    trainer = TrainerConfig.model_validate({"deepspeed": values})
    return deepspeed_config(trainer, dtype, torch.device("cuda" if on_gpu else "cpu"), grad_clip=0.3)


def test_optimizer_states_and_parameters_go_to_host_memory() -> None:
    zero = settings(zero_stage=3, offload_optimizer=True, offload_param=True)["zero_optimization"]
    assert (zero["offload_optimizer"]["device"], zero["offload_param"]["device"]) == ("cpu", "cpu")
    assert "offload_param" not in settings(zero_stage=3, offload_optimizer=True)["zero_optimization"]


def test_on_cpus_everything_is_in_host_memory_already() -> None:
    zero = settings(on_gpu=False, zero_stage=3, offload_optimizer=True, offload_param=True)["zero_optimization"]
    assert not {"offload_optimizer", "offload_param"} & set(zero)


@pytest.mark.parametrize(("dtype", "enabled"), [(torch.bfloat16, True), (torch.float32, False)])
def test_dtype_and_clipping(dtype: torch.dtype, enabled: bool) -> None:
    made = settings(dtype=dtype)
    assert (made["bf16"]["enabled"], made["gradient_clipping"]) == (enabled, 0.3)


@pytest.mark.parametrize(("stage", "said"), [(0, None), (1, None), (2, "fp32"), (3, "fp32")])
def test_gradients_are_added_in_float32_where_deepspeed_adds_them(stage: int, said: str | None) -> None:
    assert settings(zero_stage=stage)["data_types"]["grad_accum_dtype"] == said


def test_deepspeed_itself_takes_the_settings() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = settings(zero_stage=3, offload_optimizer=True, offload_param=True)["zero_optimization"]
    found = DeepSpeedZeroConfig(**zero)
    assert (found.stage, found.offload_param.device, found.offload_optimizer.pin_memory) == (3, "cpu", True)


def test_ranks_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"ulysses_sequence_parallel_size.*is 2, which does not divide the 3"):
        make_groups(Ranks(0, 3, 0), 2)
    assert make_groups(Ranks(0, 3, 0), 1) is None


@pytest.mark.parametrize(("heads", "keys", "size", "fits"), [(8, 2, 4, True), (8, 8, 4, True), (6, 2, 4, False),
                                                            (12, 3, 2, False), (12, 3, 6, True)])  # fmt: skip
def test_heads_that_cannot_be_shared_out_are_refused(heads: int, keys: int, size: int, fits: bool) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=keys)
    if fits:
        check_heads(config, size)
        return
    with pytest.raises(InvalidInput, match=f"is {size}; {size} ranks cannot share the model's {heads} heads"):
        check_heads(config, size)
