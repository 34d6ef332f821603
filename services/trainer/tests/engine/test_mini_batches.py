"""The split of a batch into several updates, and the critic's targets, against plain loops."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.programs.trainer.training import BASE
from trinity.config import make_plan
from trinity.config.algorithms import AlgorithmPlan, resolve
from trinity.config.schema import Config
from trinity.config.schema.algorithm import AlgorithmConfig
from trinity.runtime.errors import InvalidInput
from trinity.trainer.algorithms.aggregation import Totals
from trinity.trainer.data.batch import TrainBatch, TrainSequence, with_advantages
from trinity.trainer.engine.critic import explained_variance, value_loss
from trinity.trainer.engine.engine import TrainEngine
from trinity.trainer.engine.whole_batch import mini_batches, number_of_parts

pytestmark = pytest.mark.core


def plan_of(name: str) -> AlgorithmPlan:
    return resolve(AlgorithmConfig(algorithm_type=name, repeat_times=4))


def batch_of(groups: int, experts: int, step: int = 1) -> TrainBatch:
    rng = np.random.default_rng(step)
    sequences = []
    for index in range(4 * groups + experts):
        response = int(rng.integers(0, 5))
        sequences.append(
            TrainSequence(
                token_ids=np.full(response + 1, index, np.int32),
                prompt_length=1,
                old_logprobs=np.zeros(response, np.float32),
                mask=rng.random(response) < 0.8,
                group=index // 4 if index < 4 * groups else groups + index,
                reward=float(rng.normal()),
                expert=index >= 4 * groups,
            )
        )
    return TrainBatch(step, tuple(sequences))


def numbers(batch: TrainBatch) -> list[int]:
    return [int(sequence.token_ids[0]) for sequence in batch.sequences]


def test_groups_stay_whole_where_they_share_prompts() -> None:
    batch, plan = batch_of(5, 3), plan_of("grpo")
    for whole in (True, False):
        parts = list(mini_batches(batch, plan, 5, 1, whole_groups=whole))
        assert len(parts) == number_of_parts(batch, plan, 5, whole)
        places = [{s.group for s in part.sequences} for part in parts]
        divided = any(one & other for index, one in enumerate(places) for other in places[:index])
        assert divided is not whole


@given(groups=st.integers(1, 5), experts=st.integers(0, 7), size=st.integers(1, 30), epochs=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_every_pass_has_each_sequence_once(groups: int, experts: int, size: int, epochs: int) -> None:
    batch, plan = batch_of(groups, experts), plan_of("grpo")
    parts = list(mini_batches(batch, plan, size, epochs))
    count = number_of_parts(batch, plan, size)
    assert len(parts) == count * epochs
    for epoch in range(epochs):
        of_epoch = parts[epoch * count : (epoch + 1) * count]
        assert sorted(n for part in of_epoch for n in numbers(part)) == list(range(len(batch.sequences)))
        assert all(len(part.sequences) <= size or count == 1 for part in of_epoch)
        found = [sum(s.expert for s in part.sequences) for part in of_epoch]
        assert max(found) - min(found) <= 1, "expert rows are shared out evenly"


def test_one_update_sees_the_batch_itself() -> None:
    batch = batch_of(3, 0)
    assert list(mini_batches(batch, plan_of("grpo"), None, 1)) == [batch]
    assert list(mini_batches(batch, plan_of("grpo"), 12, 2)) == [batch, batch]


@pytest.mark.parametrize("name", ["dpo", "opmd_pairwise"])
def test_a_loss_of_groups_gets_whole_groups(name: str) -> None:
    for part in mini_batches(batch_of(5, 0), plan_of(name), 8, 2):
        members = [sequence.group for sequence in part.sequences]
        assert all(members.count(group) == 4 for group in members)


def test_the_order_follows_from_the_step_and_the_pass() -> None:
    def order(step: int) -> list[list[int]]:
        batch = replace(batch_of(4, 0), step=step)
        return [numbers(part) for part in mini_batches(batch, plan_of("grpo"), 4, 2)]

    assert order(3) == order(3)
    assert order(3) != order(4)
    assert order(3)[:4] != order(3)[4:], "another order for another pass"


@pytest.mark.parametrize(
    ("trainer", "decoupled", "wanted"),
    [({}, None, None), ({"mini_batch_size": 4}, None, None), ({"epochs_per_batch": 2}, None, None),
     ({"epochs_per_batch": 2}, False, False), ({}, True, True)],
)  # fmt: skip
def test_whether_a_loss_is_decoupled_is_left_to_the_batch(
    trainer: dict[str, int], decoupled: bool | None, wanted: bool | None
) -> None:
    config = {**BASE, "model": {**BASE["model"], "model_path": "m"}, "trainer": trainer}
    config["algorithm"] = {**BASE["algorithm"], "rollout_correction": {"decoupled": decoupled}}
    assert make_plan(Config.model_validate(config)).algorithm.correction.decoupled is wanted


def generalized(rewards: list[float], values: list[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """Advantages before they are whitened, and returns: the sum of discounted TD errors, term by term."""
    count = len(rewards)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < count else 0.0) - values[t] for t in range(count)]
    found = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, count)) for t in range(count)]
    return found, [a + v for a, v in zip(found, values, strict=True)]


@given(seed=st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_returns_are_those_of_a_plain_loop_and_only_action_tokens_have_them(seed: int) -> None:
    plan = resolve(AlgorithmConfig(algorithm_type="ppo", advantage_fn_args={"gamma": 0.9, "lam": 0.7}))
    batch, rng = batch_of(3, 0, seed), np.random.default_rng(seed)
    values = [rng.normal(size=s.response_length).astype(np.float32) for s in batch.sequences]
    everything = []
    for given_, before, sequence in zip(
        with_advantages(batch.sequences, plan, 1, None, values), values, batch.sequences, strict=True
    ):
        own = [float(v) for v in before[sequence.mask]]
        rewards = [0.0] * len(own)
        if rewards:
            rewards[-1] = sequence.reward
        advantages, returns = generalized(rewards, own, 0.9, 0.7)
        everything += advantages
        assert given_.returns is not None
        assert given_.returns[sequence.mask].tolist() == pytest.approx(returns, abs=1e-5)
        assert not given_.returns[~sequence.mask].any()
    explained = explained_variance(with_advantages(batch.sequences, plan, 1, None, values))
    assert explained is None or explained <= 1.0


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
@given(seed=st.integers(0, 999), cliprange=st.sampled_from([0.0, 0.2, 0.5]))
@settings(max_examples=30, deadline=None)
def test_the_value_loss_is_that_of_a_plain_loop(
    dtype: torch.dtype, tolerance: float, seed: int, cliprange: float
) -> None:
    torch.manual_seed(seed)
    values, old, returns = (torch.randn(3, 4, dtype=dtype) for _ in range(3))
    values.requires_grad_()
    mask = (torch.rand(3, 4) < 0.7).to(dtype)
    total = int(mask.sum()) + 5  # of other micro-batches
    loss, report = value_loss(values, old, returns, mask, Totals(total, 3), cliprange)
    loss.backward()
    expected, slopes = 0.0, []
    for v, o, r, m in zip(*(t.flatten().tolist() for t in (values, old, returns, mask)), strict=True):
        held = min(max(v, o - cliprange), o + cliprange) if cliprange else v
        plain, clipped = (v - r) ** 2, (held - r) ** 2
        expected += m * 0.5 * max(plain, clipped) / total
        slope = (v - r) if plain >= clipped or held == v else 0.0
        slopes.append(m * slope / total)
    assert float(loss) == pytest.approx(expected, abs=tolerance)
    assert values.grad is not None
    assert values.grad.flatten().tolist() == pytest.approx(slopes, abs=tolerance)
    assert int(report["critic/value_loss"][1]) == int(mask.sum())


def test_a_checkpoint_without_a_critic_gives_none(tmp_path: Path) -> None:
    engine: Any = SimpleNamespace(_critic=object())
    with pytest.raises(
        InvalidInput, match=r"algorithm\.algorithm_type: needs a critic, and the checkpoint .* has none"
    ):
        TrainEngine.load(engine, tmp_path / "global_step_3/actor")
