"""Losses and advantages against numbers that their authors' own code gave (support/checks/losses/recorded.py)."""

import math

import pytest
import torch

from support.checks.losses import recorded
from support.checks.losses.loss_cases import LIMIT, Case
from support.checks.losses.peer_advantages import ADVANTAGES
from support.checks.losses.peer_algorithms import LOSSES, Peer
from trinity.trainer.algorithms.aggregation import Share
from trinity.trainer.algorithms.policy_losses import POLICY_LOSSES

pytestmark = pytest.mark.core

# Declared on docs/algorithms_measured.md.
DIFFERENT = {("sapo", "Trinity-RFT"), ("dpo", "Trinity-RFT"), ("jsd", "Trinity-RFT")}


def of_code(peers: tuple[Peer, ...]) -> list[Peer]:
    return [peer for peer in peers if isinstance(peer.theirs, str)]


@pytest.mark.parametrize("peer", of_code(LOSSES), ids=lambda peer: f"{peer.name} of {peer.whose}")
def test_gradients_are_those_of_their_code(peer: Peer) -> None:
    assert isinstance(peer.theirs, str)
    difference = recorded.of_loss(peer.theirs, peer.name, peer.mode, peer.settings)
    assert (difference < 1e-7) == ((peer.name, peer.whose) not in DIFFERENT), difference


@pytest.mark.parametrize("peer", of_code(ADVANTAGES), ids=lambda peer: f"{peer.name} of {peer.whose}")
def test_advantages_are_those_of_their_code(peer: Peer) -> None:
    assert isinstance(peer.theirs, str)
    difference = recorded.of_advantage(peer.theirs, peer.name, peer.settings)
    assert (difference < 1e-6) == ((peer.name, peer.whose) not in DIFFERENT), difference  # in single precision there


def test_m2po_leaves_out_the_token_at_the_bound_as_its_authors_do() -> None:
    assert recorded.of_loss("m2po/m2po 0.3", "m2po", "token-mean", {"m2_threshold": 0.3}) < 1e-7


def test_gmpo_weighs_a_sequence_by_the_geometric_mean_as_verl_does() -> None:
    def gradient(case: Case) -> torch.Tensor:
        x = case.x
        assert x.reference_logprobs is not None
        weights = (x.reference_logprobs - x.old_logprobs).exp().clamp(max=2.0)
        share = Share(case.mode, case.totals, weights, LIMIT)
        loss, _ = POLICY_LOSSES["gmpo"](x.only_masked(), share, clip_range_low=0.2, clip_range_high=0.2)
        (found,) = torch.autograd.grad(loss, x.logprobs)
        return found

    assert recorded.largest("verl/gmpo, weighed", gradient, "seq-mean-token-sum") < 1e-7


def test_a_weight_of_0_leaves_its_sequence_out_of_the_geometric_mean() -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    weights = torch.tensor([[2.0, 8.0, 0.0], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    share = Share("token-mean", None, weights).by_geometric_mean(mask)  # type: ignore[arg-type]
    assert share.weights is not None
    assert share.weights[:, 0].tolist() == pytest.approx([4.0, 0.0, 1.0])
    assert math.isfinite(float(share.weights.sum()))
