"""Every advantage function against its loop in plain floats, on ragged random batches."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.checks.losses import peer_advantages, recorded
from support.checks.losses.plain_advantages import REFERENCES, rollouts_of, token_rewards
from trinity.plugins.declarations import ADVANTAGES as NAMES
from trinity.trainer.algorithms.advantages import ADVANTAGES, compute, grpo

pytestmark = pytest.mark.core


def test_every_registered_name_has_a_reference() -> None:
    assert set(REFERENCES) == {name for name, one in ADVANTAGES.items() if not one.alias_of}


@pytest.mark.parametrize("name", REFERENCES)
@given(seed=st.integers(0, 10_000), choice=st.integers(0, 9), penalties=st.booleans(), values=st.booleans())
@settings(max_examples=60, deadline=None)
def test_it_is_its_formula(name: str, seed: int, choice: int, penalties: bool, values: bool) -> None:
    reference, variants = REFERENCES[name]
    args = [{}, *variants][choice % (len(variants) + 1)]
    rollouts = rollouts_of(seed, penalties, values)
    found = compute(name, {**NAMES[name].defaults, **args}, rollouts)
    for tokens, mask, expected in zip(found.tokens, rollouts.masks, reference(rollouts, **args), strict=True):
        assert tokens[mask].tolist() == pytest.approx(expected, abs=1e-6, rel=1e-6)
        assert not tokens[~mask].any(), "only action tokens have an advantage"


@given(seed=st.integers(0, 10_000), gamma=st.sampled_from([1.0, 0.9]))
@settings(max_examples=30, deadline=None)
def test_a_critic_learns_advantage_plus_value_before_whitening(seed: int, gamma: float) -> None:
    rollouts = rollouts_of(seed, values=True)
    found = compute("ppo", {"gamma": gamma, "lam": 1.0}, rollouts)
    assert found.returns is not None
    for index, target in enumerate(found.returns):
        rewards = token_rewards(rollouts, index)
        discounted = [sum(gamma**k * v for k, v in enumerate(rewards[t:])) for t in range(len(rewards))]
        assert target[rollouts.masks[index]].tolist() == pytest.approx(discounted, abs=1e-9), "with lambda = 1"


def test_the_tensor_form_of_grpo() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 1])
    assert grpo(rewards, groups).tolist() == pytest.approx([0.5 / (0.5**0.5 + 1e-6), -0.5 / (0.5**0.5 + 1e-6), 3.0])
    assert len(grpo(torch.zeros(0), torch.zeros(0, dtype=torch.long))) == 0


@pytest.mark.parametrize(
    ("name", "settings", "other"),
    [
        ("asymre", {}, {"baseline_shift": -0.2}),
        ("step_wise_grpo", {}, {"enable_step_norm": True}),
        ("gigpo", {"state_scope": "batch"}, {"state_scope": "task"}),
    ],
)
def test_what_others_compute_can_differ(name: str, settings: dict[str, Any], other: dict[str, Any]) -> None:
    key = f"trinity-rft/advantage {name}"
    assert recorded.of_advantage(key, name, settings) < 1e-6
    assert recorded.of_advantage(key, name, {**settings, **other}) > 0.05


def test_loops_of_others_are_none_of_ours() -> None:
    own = {id(reference) for reference, _ in REFERENCES.values()}
    assert not [peer.name for peer in peer_advantages.ADVANTAGES if id(peer.theirs) in own]
