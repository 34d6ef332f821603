"""Each family trains on the log-probabilities and gradients that transformers computes one sequence at a time."""

from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.families import FAMILIES, VOCABULARY, WINDOW, Family, make_model
from safetensors.torch import load_file, save_file

from trinity.config.schema.model import LoraConfig, ModelConfig
from trinity.runtime.errors import InvalidInput
from trinity.trainer.data.batch import TrainSequence
from trinity.trainer.data.microbatch import collate
from trinity.trainer.engine.optimizers import _matrices
from trinity.trainer.model.attention import check_shared_prompts, why_not_packed
from trinity.trainer.model.file_parts import FileParts
from trinity.trainer.model.policy import PolicyModel, load_policy
from trinity.trainer.model.vision import freeze_all_but_text
from trinity.weights.lora import in_model, merged


def cases(families: Iterable[Family]) -> list[Any]:
    """Parameters of a test: three families in the core tier, the others extended."""
    return [
        pytest.param(family, id=family.kind, marks=pytest.mark.core if family.in_core else pytest.mark.extended)
        for family in families
    ]


CLOSE: Any = {"atol": 2e-4, "rtol": 2e-4}


def sequences(branched: bool = False, longest: int = 24) -> list[TrainSequence]:
    """Sequences of several lengths, some beyond a window. branched: three responses to longer prompts, of which two
    begin with the same half."""
    rng = np.random.default_rng(0)
    made: list[TrainSequence] = []
    for group, (prompt, response) in enumerate(
        [(3, min(17, longest)), (1, 1), (9, min(12, longest)), (2, 0), (5, longest)]
    ):
        prompt += 8 if branched else 0
        tokens = rng.integers(2, VOCABULARY - 8, prompt)
        for number in range(3 if branched else 1):
            whole = np.concatenate([tokens, rng.integers(2, VOCABULARY - 8, response)]).astype(np.int32)
            if number == 2:
                whole[prompt : prompt + response // 2] = made[-1].token_ids[prompt : prompt + response // 2]
            nothing = np.zeros(response, np.float32)
            made.append(TrainSequence(whole, prompt, nothing, nothing == 0, group=group, temperature=1.0))
    return made


def plainly(model: Any, batch: list[TrainSequence]) -> torch.Tensor:
    """Log-probabilities of all responses, one sequence at a time, by transformers' own forward."""
    found = []
    for sequence in batch:
        ids = torch.from_numpy(np.asarray(sequence.token_ids, np.int64))[None]
        logs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits.float(), -1)[0]
        begin = sequence.length - sequence.response_length
        found.append(logs[begin - 1 : -1].gather(1, ids[0, begin:, None])[:, 0][: sequence.response_length])
    return torch.cat(found)


def by_policy(policy: PolicyModel, batch: list[TrainSequence], **layout: Any) -> torch.Tensor:
    logprobs, _ = policy(collate(batch, 0, **layout))
    return torch.cat([row[: one.response_length] for row, one in zip(logprobs, batch, strict=True)])


def gradients(model: torch.nn.Module, value: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    value.sum().backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


def policy_of(folder: Path, packed: bool, lora: LoraConfig | None = None) -> PolicyModel:
    config = ModelConfig(model_path=str(folder), lora_configs=None if lora is None else [lora])
    policy = load_policy(config, torch.float32, 7, packed=packed)
    if lora is None:
        freeze_all_but_text(policy.model)
    return policy.eval()


@pytest.mark.parametrize("family", cases(FAMILIES))
def test_padded_and_packed_batches_are_exact(family: Family, tmp_path: Path) -> None:
    plain = make_model(family, tmp_path).eval()
    plain.set_attn_implementation("eager")
    batch = sequences()
    expected = plainly(plain, batch)
    slopes = gradients(plain, expected)
    for packed in (False, True):
        policy = policy_of(tmp_path, packed)
        if packed:
            assert bool(family.not_packed) == (why_not_packed(policy.model) is not None) == (not policy.packed)
        found = by_policy(policy, batch, packed=policy.packed)
        torch.testing.assert_close(found, expected, **CLOSE)
        own = {name.removeprefix("model."): slope for name, slope in gradients(policy, found).items()}
        assert own.keys() == slopes.keys()
        for name, slope in slopes.items():
            torch.testing.assert_close(own[name], slope, atol=2e-3 * float(1e-3 + slope.abs().max()), rtol=2e-3)


@pytest.mark.parametrize("family", cases(one for one in FAMILIES if not one.not_packed))
def test_shared_prefixes_are_exact_or_refused(family: Family, tmp_path: Path) -> None:
    plain = make_model(family, tmp_path).eval()
    policy = policy_of(tmp_path, packed=True)
    if family.windowed:
        with pytest.raises(InvalidInput, match=f"window of {WINDOW} tokens"):
            check_shared_prompts(policy.model, True, WINDOW + 1)
        return
    check_shared_prompts(policy.model, True, 64)
    batch = sequences(branched=True)
    found = by_policy(policy, batch, packed=True, units=[len(batch)])
    torch.testing.assert_close(found, plainly(plain, batch), **CLOSE)


def layer_weights(names: Iterable[str]) -> set[str]:
    """Names of the weights of the language model's layers, spelt as in memory."""
    return {in_model(name) for name in names if ".layers." in name and name.endswith(".weight") and "vis" not in name}


@pytest.mark.parametrize("family", cases(FAMILIES))
def test_a_version_has_the_tensors_of_the_files_and_towers_stay(family: Family, tmp_path: Path) -> None:
    make_model(family, tmp_path / "base")
    policy = policy_of(tmp_path / "base", packed=False)
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.mul_(1.1)
    parts = FileParts(policy.model)
    version = {name: tensor.clone() for own, weight in policy.weights() for name, tensor in parts.cut(own, weight.data)}
    (tmp_path / "next").mkdir()
    save_file(version, tmp_path / "next/model.safetensors", metadata={"format": "pt"})
    for file in (tmp_path / "base").glob("*.json"):
        (tmp_path / "next" / file.name).write_text(file.read_text())
    files = load_file(tmp_path / "base/model.safetensors")
    if family.adapters:  # else names of the files and of the layers differ
        assert layer_weights(version) == layer_weights(files) != set()
    batch = sequences()
    again = policy_of(tmp_path / "next", packed=False)
    torch.testing.assert_close(by_policy(again, batch), by_policy(policy, batch))
    before = policy_of(tmp_path / "base", packed=False)
    frozen = {name for name, weight in policy.named_parameters() if not weight.requires_grad}
    assert bool(frozen) == family.has_tower
    assert not any("language_model.layers" in name for name in frozen)
    own, old = dict(again.named_parameters()), dict(before.named_parameters())
    assert all(torch.equal(own[name], old[name]) for name in frozen)


@pytest.mark.parametrize("family", cases(one for one in FAMILIES if one.adapters))
def test_merged_adapters_are_the_trained_model(family: Family, tmp_path: Path) -> None:
    assert_merged(family, tmp_path, LoraConfig(lora_rank=2, lora_alpha=4))


def assert_merged(family: Family, tmp_path: Path, lora: LoraConfig) -> None:
    """Trains adapters of a new model of the family by noise, and compares it with the files that result."""
    plain = make_model(family, tmp_path).eval()
    plain.set_attn_implementation("eager")
    policy = policy_of(tmp_path, packed=False, lora=lora)
    batch = sequences()
    begin = by_policy(policy, batch).detach()
    torch.testing.assert_close(begin, plainly(plain, batch), **CLOSE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, adapter in policy.weights():
            adapter.add_(torch.randn(adapter.shape, generator=generator) * 0.1)
    assert policy.lora is not None and (by_policy(policy, batch) - begin).abs().max() > 0.05
    adapters = {name: weight.data for name, weight in policy.weights()}
    base = load_file(tmp_path / "model.safetensors")
    policy.lora.check_base({name: tuple(tensor.shape) for name, tensor in base.items()})
    assert not any("vis" in target.name for target in policy.lora.targets)
    whole = dict(merged(base.items(), adapters, policy.lora, "cpu"))
    save_file({n: t.contiguous() for n, t in whole.items()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    changed = policy_of(tmp_path, packed=False)
    torch.testing.assert_close(by_policy(policy, batch), by_policy(changed, batch), atol=5e-3, rtol=1e-3)


@pytest.mark.parametrize("family", cases(FAMILIES))
def test_muon_updates_the_matrices_of_the_files(family: Family, tmp_path: Path) -> None:
    """Experts one by one; no embedding, head, norm, bias or convolution, and nothing that is frozen."""
    make_model(family, tmp_path)
    policy = policy_of(tmp_path, packed=False)
    found = Counter((one.rows, one.columns) for parts in dict(_matrices(policy)).values() for one in parts)
    apart = ("embed", "norm", "conv", "bias", "lm_head", "visual", "vision", "multi_modal_projector")
    expected: Counter[tuple[int, int]] = Counter()
    for path in tmp_path.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if tensor.dim() > 1 and not any(word in name for word in apart):
                expected[tensor.shape[-2], tensor.shape[-1]] += prod(tensor.shape[:-2])
    assert found == expected
    assert sum(found.values()) >= 7
