"""What a canary accepts and rejects, on real models in bfloat16 with logits of any scale."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from trinity.trainer.weights import canary
from trinity.weights.manifest import Canary, Measured

pytestmark = pytest.mark.core

VOCABULARY, LAYERS = 2000, 4
PROBE = canary.pseudo_random_probe(VOCABULARY)
IDS = torch.tensor(PROBE)
USUAL = (0.05, 1.5)


def make(scale: float) -> Qwen2ForCausalLM:
    """In bfloat16, with logits of this standard deviation."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.06,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight *= scale / model(IDS).logits.std()
    return model.to(torch.bfloat16)


def logprobs(logits: torch.Tensor) -> torch.Tensor:
    """[rows, tokens - 1], of the probe's own tokens."""
    return torch.log_softmax(logits.float()[:, :-1], -1).gather(2, IDS[:, 1:, None])[..., 0]


def trainers_canary(model: Qwen2ForCausalLM, trains_in_float32: bool) -> Canary:
    """As the trainer makes it, which computes its head in its own dtype and in the other one."""
    model = model.float() if trains_in_float32 else model
    with torch.no_grad():
        hidden, weight = model.model(IDS).last_hidden_state, model.lm_head.weight
        exact, rounded = (logprobs(hidden.to(d) @ weight.to(d).T).tolist() for d in (torch.float32, torch.bfloat16))
    plain, other = (exact, rounded) if trains_in_float32 else (rounded, exact)
    return canary.make_canary(PROBE, plain, canary.widened(USUAL, plain, other), 1)


def passes(expected: Canary, engine: Qwen2ForCausalLM) -> bool:
    """An engine with other arithmetic than the trainer: in float32 up to the logits, which it rounds."""
    with torch.no_grad():
        computed = logprobs(engine.float()(IDS).logits.bfloat16()).numpy()
    errors = np.abs(computed - np.array([probe.logprobs for probe in expected.probes]))
    return bool(errors.mean() <= expected.mean_tolerance and errors.max() <= expected.max_tolerance)


def is_5_percent_larger(weight: torch.Tensor) -> None:
    weight *= 1.05


def has_noise_of_5_percent(weight: torch.Tensor) -> None:
    weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("trains_in_float32", [False, True])
@pytest.mark.parametrize("scale", [1.0, 10.0, 30.0])
def test_a_sound_model_passes_whatever_the_scale_of_its_logits(scale: float, trains_in_float32: bool) -> None:
    assert passes(trainers_canary(make(scale), trains_in_float32), make(scale))


@pytest.mark.parametrize("perturb", [is_5_percent_larger, has_noise_of_5_percent])
@pytest.mark.parametrize("layer", [0, LAYERS // 2, LAYERS - 1])
@pytest.mark.parametrize("scale", [10.0, 30.0])
def test_a_model_with_one_layer_off_by_5_percent_is_found(
    scale: float, layer: int, perturb: Callable[[torch.Tensor], None]
) -> None:
    expected, engine = trainers_canary(make(scale), trains_in_float32=False), make(scale).float()
    with torch.no_grad():
        for name, weight in engine.named_parameters():
            if name.startswith(f"model.layers.{layer}.") and name.endswith("proj.weight"):
                perturb(weight)
    assert not passes(expected, engine)


def test_a_rare_token_may_differ_far_more_than_the_mean() -> None:
    """A sound engine of a pretrained model differed by 0.0498 nats in the mean, by 1.37 for one token."""
    mean, most = canary.widened(USUAL, [[-11.4112]], [[-11.3941]])
    made = canary.make_canary(((1, 2),), [[-11.4112]], (mean, most), 6)
    assert Measured(0.0498, 1.37, -11.4112, -10.0418).within(made, "bfloat16")
    assert not Measured(mean * 1.01, 1.37, -11.4112, -10.0418).within(made, "bfloat16")
    assert not Measured(0.0498, most * 1.01, -11.4112, -7.0).within(made, "bfloat16")


def test_small_logits_keep_the_usual_tolerances() -> None:
    made = trainers_canary(make(1.0), trains_in_float32=False)
    assert (made.mean_tolerance, made.max_tolerance) == USUAL
