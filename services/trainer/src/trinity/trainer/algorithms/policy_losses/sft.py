"""Likelihood of given responses, plain or weighted by how likely they are already."""

import math

import torch

from trinity.trainer.algorithms.aggregation import Share
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.report import Report, masked_sum


def sft(x: LossInputs, share: Share, *, use_token_level_loss: bool = True) -> tuple[torch.Tensor, Report]:
    """-lp. Not token-level: the mean of sequences' means under every aggregation mode."""
    return _share(-x.logprobs, x, share, use_token_level_loss)


def sft_is(x: LossInputs, share: Share, *, use_token_level_loss: bool = True) -> tuple[torch.Tensor, Report]:
    """-lp sg(p), p = exp(lp): the token's own probability as an importance weight. DFT, arXiv:2508.05629."""
    return _share(-x.logprobs * x.logprobs.detach().exp(), x, share, use_token_level_loss)


def sft_phi(
    x: LossInputs, share: Share, *, use_token_level_loss: bool = True, cutoff_prob: float = 1.0
) -> tuple[torch.Tensor, Report]:
    """-min(lp, log cutoff_prob) sg(p (1 - p)): neither the certain nor the impossible. CHORD, arXiv:2508.11408."""
    p = x.logprobs.detach().exp()
    logprobs = x.logprobs if cutoff_prob == 1 else x.logprobs.clamp(max=math.log(cutoff_prob))
    return _share(-logprobs * p * (1 - p), x, share, use_token_level_loss)


def _share(values: torch.Tensor, x: LossInputs, share: Share, token_level: bool) -> tuple[torch.Tensor, Report]:
    report = {"sft_loss": masked_sum(-x.logprobs.detach(), x.mask)}
    return (share if token_level else share.by("seq-mean-token-mean"))(values, x.mask), report
