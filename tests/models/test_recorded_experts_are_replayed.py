"""The trainer's gates send tokens to recorded experts, weighed as transformers weighs them, in every layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.families import FAMILIES, Family, make_model
from models.test_families_compute_as_transformers import CLOSE, by_policy, gradients, sequences

from trinity.config.experts import REPLAYED, mixture_of
from trinity.config.schema.model import LoraConfig, ModelConfig
from trinity.data.routes import Routes
from trinity.runtime.errors import InvalidInput
from trinity.trainer.data.bad_steps import Undecodable
from trinity.trainer.data.batch import TrainBatch, TrainSequence
from trinity.trainer.data.microbatch import collate
from trinity.trainer.model.checkpointing import recompute_activations
from trinity.trainer.model.policy import PolicyModel, load_policy
from trinity.trainer.model.router_replay import replayed_share
from trinity.trainer.model.routers import gates_of
from trinity.trainer.model.vision import text_body

MIXTURES = [one for one in FAMILIES if one.kind in REPLAYED]
CORE = ("qwen3_moe", "deepseek_v3")


def cases(families: list[Family]) -> list[Any]:
    return [
        pytest.param(one, id=one.kind, marks=pytest.mark.core if one.kind in CORE else pytest.mark.extended)
        for one in families
    ]


def policy_of(folder: Path, packed: bool, **others: Any) -> PolicyModel:
    config = ModelConfig(model_path=str(folder), **others)
    return load_policy(config, torch.float32, 7, packed=packed, replay=True).eval()


def mixture(family: Family, folder: Path) -> Any:
    """A model whose gates prefer some experts clearly."""
    model = make_model(family, folder)
    with torch.no_grad():
        for _, gate in gates_of(text_body(model)):
            torch.nn.init.normal_(gate.weight, std=1.0)
    model.save_pretrained(folder)
    return model.eval()


def chosen_by(model: Any, sequence: TrainSequence) -> np.ndarray:
    """The experts that the model's gates choose, [T - 1, layers, chosen]."""
    config, found, hooks = model.config.get_text_config(), {}, []
    for name, gate in gates_of(text_body(model)):
        layer = int(name.split("layers.")[1].split(".")[0])
        hooks.append(gate.register_forward_hook(lambda _gate, _, outputs, at=layer: found.update({at: outputs[2]})))
    model(input_ids=torch.from_numpy(np.asarray(sequence.token_ids, np.int64))[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    routes = np.zeros((sequence.length - 1, config.num_hidden_layers, config.num_experts_per_tok), np.uint8)
    for layer, ids in found.items():
        routes[:, layer] = ids[: sequence.length - 1]
    return routes


def elsewhere(routes: np.ndarray) -> np.ndarray:
    """Other experts of the four that each family of the tests has."""
    return (routes + np.arange(len(routes))[:, None, None].astype(np.uint8) % 3 + 1) % 4


def with_routes(batch: list[TrainSequence], routes: list[np.ndarray]) -> list[TrainSequence]:
    return [replace(one, routes=Routes.of(ids)) for one, ids in zip(batch, routes, strict=True)]


@pytest.mark.parametrize("family", cases(MIXTURES))
def test_the_own_choice_replayed_changes_nothing_and_another_one_does(family: Family, tmp_path: Path) -> None:
    plain, batch = mixture(family, tmp_path), sequences()
    own = with_routes(batch, [chosen_by(plain, one) for one in batch])
    other = with_routes(batch, [elsewhere(chosen_by(plain, one)) for one in batch])
    policy = policy_of(tmp_path, packed=not family.not_packed)
    packed = policy.packed
    expected = by_policy(policy, batch, packed=packed)
    slopes = gradients(policy, expected)
    found = by_policy(policy, own, packed=packed)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    of_gates = 0
    for name, slope in gradients(policy, found).items():
        torch.testing.assert_close(slope, slopes[name], atol=1e-4 * float(1e-2 + slope.abs().max()), rtol=1e-3)
        of_gates += bool("gate" in name or "router" in name) and float(slope.abs().max()) > 1e-6
    assert of_gates, "the gradient flows through the gates' weights"
    moved = by_policy(policy, other, packed=packed)
    assert (moved - expected).abs().mean() > 1e-3
    alone = torch.cat([by_policy(policy, [one], packed=packed) for one in other])
    torch.testing.assert_close(moved, alone, **CLOSE)
    if packed:
        padded = policy_of(tmp_path, packed=False)
        torch.testing.assert_close(by_policy(padded, other), moved, **CLOSE)
    mixed = [a if index % 2 else b for index, (a, b) in enumerate(zip(batch, other, strict=True))]
    alone = torch.cat([by_policy(policy, [one], packed=packed) for one in mixed])
    torch.testing.assert_close(by_policy(policy, mixed, packed=packed), alone, **CLOSE)


@pytest.mark.parametrize("family", cases(MIXTURES[:1]))
@pytest.mark.parametrize("what", [True, "mlp"])
def test_layers_that_are_computed_again_take_the_same_experts(family: Family, what: Any, tmp_path: Path) -> None:
    plain, batch = mixture(family, tmp_path), sequences()
    other = with_routes(batch, [elsewhere(chosen_by(plain, one)) for one in batch])
    slopes = []
    for recompute in (False, what):
        policy = policy_of(tmp_path, packed=True).train()
        recompute_activations(policy.model, recompute)
        slopes.append(gradients(policy, by_policy(policy, other, packed=True)))
    for name, slope in slopes[0].items():
        torch.testing.assert_close(slopes[1][name], slope, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", cases(MIXTURES[:1]))
def test_shared_prefixes_and_adapters(family: Family, tmp_path: Path) -> None:
    plain, batch = mixture(family, tmp_path), sequences(branched=True)
    routes = [elsewhere(chosen_by(plain, one)) for one in batch]
    for index, one in enumerate(batch):  # an engine reads a shared prompt once
        shared = one.prompt_length - (one.response_length == 0)
        routes[index][:shared] = routes[index - index % 3][:shared]
    other = [one for one in with_routes(batch, routes) if one.response_length > 0]
    policy = policy_of(tmp_path, packed=True)
    expected = by_policy(policy, other, packed=True)
    torch.testing.assert_close(by_policy(policy, other, packed=True, units=[len(other)]), expected, **CLOSE)
    adapters = policy_of(tmp_path, packed=True, lora_configs=[LoraConfig(lora_rank=2)])
    torch.testing.assert_close(by_policy(adapters, other, packed=True), expected, **CLOSE)
    part = collate(other, 0, packed=True)
    halves = [part.part(index, 2) for index in range(2)]
    assert torch.equal(torch.cat([half.routes for half in halves])[: len(part.routes)], part.routes)  # type: ignore[misc,arg-type]


@pytest.mark.core
def test_routes_of_another_model_are_a_bad_step(tmp_path: Path) -> None:
    family = MIXTURES[0]
    plain, batch = mixture(family, tmp_path), sequences()
    policy = policy_of(tmp_path, packed=True)
    routes = [chosen_by(plain, one) for one in batch]
    assert policy.replay is not None
    policy.replay.check(TrainBatch(3, tuple(with_routes(batch, routes))))
    sizes = mixture_of(str(tmp_path))
    assert sizes is not None
    assert (sizes.layers, sizes.chosen, sizes.experts) == (*routes[0].shape[1:], 4)
    routes[2][1, 1, 0] = 4
    with pytest.raises(Undecodable, match=r"routes are not of this model .*; groups 2 of"):
        policy.replay.check(TrainBatch(3, tuple(with_routes(batch, routes))))
    with pytest.raises(Undecodable, match="groups 0, 1, 2, 3, 4 of"):
        policy.replay.check(TrainBatch(3, tuple(with_routes(batch, [ids[:, :1] for ids in routes]))))


@pytest.mark.core
def test_the_share_of_replayed_tokens(tmp_path: Path) -> None:
    plain, batch = mixture(MIXTURES[0], tmp_path), sequences()
    some = [*with_routes(batch[:1], [chosen_by(plain, batch[0])]), *batch[1:]]
    known, total = replayed_share(collate(some, 0, packed=True)).tolist()
    assert (known, total) == (batch[0].response_length, sum(one.response_length for one in batch))
    assert replayed_share(collate(batch, 0)).tolist() == [0, total]


@pytest.mark.core
def test_a_family_without_a_known_gate_is_refused_by_name(tmp_path: Path) -> None:
    for family in (one for one in FAMILIES if one.kind in ("qwen3", "llama4_text", "granitemoehybrid")):
        make_model(family, tmp_path / family.kind)
        with pytest.raises(InvalidInput, match=rf"enable_router_replay: is true, and a model of type {family.kind}"):
            policy_of(tmp_path / family.kind, packed=False)
