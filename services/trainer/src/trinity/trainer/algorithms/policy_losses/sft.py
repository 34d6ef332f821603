"""Likelihood of given responses, plain or weighted by their current likelihood."""

import math

import torch

from trinity.plugins import PositiveFraction, algorithm, policy_loss
from trinity.trainer.algorithms.aggregation import Report, Share, masked_sum
from trinity.trainer.algorithms.inputs import LossInputs


@policy_loss("sft", traits=["experts"])
def sft(x: LossInputs, share: Share, *, use_token_level_loss: bool = True) -> tuple[torch.Tensor, Report]:
    """-lp. Not token-level: the mean of sequences' means under every aggregation mode."""
    return _share(-x.logprobs, x, share, use_token_level_loss)


@policy_loss("sft_is", source="DFT, arXiv:2508.05629", traits=["experts"])
def sft_is(x: LossInputs, share: Share, *, use_token_level_loss: bool = True) -> tuple[torch.Tensor, Report]:
    """-lp sg(p), p = exp(lp). The token's own probability is its importance weight."""
    return _share(-x.logprobs * x.logprobs.detach().exp(), x, share, use_token_level_loss)


@policy_loss("sft_phi", source="CHORD, arXiv:2508.11408", traits=["experts"])
def sft_phi(
    x: LossInputs, share: Share, *, use_token_level_loss: bool = True, cutoff_prob: PositiveFraction = 1.0
) -> tuple[torch.Tensor, Report]:
    """-min(lp, log cutoff_prob) sg(p (1 - p)). Certain and impossible tokens have no gradient."""
    p = x.logprobs.detach().exp()
    logprobs = x.logprobs if cutoff_prob == 1 else x.logprobs.clamp(max=math.log(cutoff_prob))
    return _share(-logprobs * p * (1 - p), x, share, use_token_level_loss)


def _share(values: torch.Tensor, x: LossInputs, share: Share, token_level: bool) -> tuple[torch.Tensor, Report]:
    report = {"sft_loss": masked_sum(-x.logprobs.detach(), x.mask)}
    return (share if token_level else share.by("seq-mean-token-mean"))(values, x.mask), report


algorithm("sft", policy_loss="sft", offline=True, repeat_times=1, note="Learns from worked answers (mode train).")
algorithm("cpt", policy_loss="sft", offline=True, repeat_times=1, note="Learns from plain text, every token of it.")
algorithm(
    "raft",
    policy_loss="sft",
    note="Learns from the best rollouts of each task, which the operator raft_filter keeps.",
    operators=({"name": "raft_filter", "args": {"k": 2}},),
)
