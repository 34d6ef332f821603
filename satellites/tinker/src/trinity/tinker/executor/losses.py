"""The losses of tenants, by the trainer's functions. Each is a sum over tokens, as the `tinker` client expects it."""

from collections.abc import Mapping

import torch

from trinity.tinker.commands.checks import clip_bounds
from trinity.trainer.algorithms.aggregation import Share, Totals
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.policy_losses.cispo import cispo
from trinity.trainer.algorithms.policy_losses.importance_sampling import importance_sampling
from trinity.trainer.algorithms.policy_losses.ppo import ppo
from trinity.trainer.algorithms.policy_losses.sft import sft

_SUM = Share("seq-mean-token-sum", Totals(1, 1))
_NO_DUAL_CLIP = float("inf")


def token_loss(
    name: str, config: Mapping[str, float | str], logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Returns the loss of some sequences, a scalar: the sum over tokens.

    logprobs, and `inputs` by their names: float32 [B, N], 0 after each sequence's end.

    cross_entropy: -w lp. importance_sampling: -A r, r = exp(lp - lq). ppo: max(-A r, -A clip(r, low, high)).
    cispo: -A sg(clip(r, low, high)) lp.
    """
    nothing = torch.zeros_like(logprobs)
    old, advantages = inputs.get("logprobs", nothing), inputs.get("advantages", nothing)
    x = LossInputs(logprobs, nothing, torch.ones_like(logprobs), old, advantages)
    if name == "cross_entropy":
        return sft(x, Share(_SUM.mode, _SUM.totals, weights=inputs["weights"]))[0]
    if name == "importance_sampling":
        return importance_sampling(x, _SUM)[0]
    low, high = clip_bounds(config)
    if name == "ppo":
        return ppo(x, _SUM, clip_range_low=1 - low, clip_range_high=high - 1, clip_ratio_c=_NO_DUAL_CLIP)[0]
    assert name == "cispo"
    return cispo(x, _SUM, clip_range_low=1 - low, clip_range_high=high - 1)[0]
