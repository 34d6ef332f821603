"""Corrects any loss for the difference between the trainer's weights and the behaviour policy.

rho = exp(trainer's log-probability before the step - the engine's), the exponent clamped to +-20. A masked token has
loss 0 and still counts in means, so that the loss does not depend on the split of the batch.
"""

from dataclasses import replace

import numpy as np
import torch

from trinity.config.schema.algorithm import RolloutCorrectionConfig
from trinity.trainer.algorithms.aggregation import Report, masked_sum
from trinity.trainer.algorithms.inputs import LIMIT, LossInputs, sequence_mean, sequence_sum


def correct(x: LossInputs, config: RolloutCorrectionConfig) -> tuple[LossInputs, torch.Tensor | None, Report]:
    """Returns inputs for the policy loss, weights of its token losses ([B, R] or [B, 1]; None: 1), and a report.

    token_cap: min(rho, cap) (truncated importance sampling: Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training"). sequence_cap: min(product over the sequence, cap). token_range: 0 outside
    (IcePop: Zhao et al. 2025, "Small leak can sink a great ship"; its weight inside is rho: token_cap = the upper end).
    geometric_range: 0 for sequences the geometric mean of whose rho is outside (Liu et al. 2025, "When speed kills
    stability"). decoupled: the loss's ratio is relative to the trainer's weights before the step; the weights correct
    their ratio to the rollouts (decoupled PPO, arXiv:2110.00641, equation 5; arXiv:2505.24298). Rows of a dataset have
    weight 1.
    """
    decoupled = replace(x, old_logprobs=x.proximal) if decouples(config, x.proximal_logprobs) else x
    if config == RolloutCorrectionConfig(decoupled=config.decoupled):
        return decoupled, None, {}
    log_rho = (x.proximal - x.old_logprobs).clamp(-LIMIT, LIMIT)
    weights = log_rho.new_ones(len(log_rho), 1)
    if config.token_cap is not None:
        weights = weights * log_rho.exp().clamp(max=config.token_cap)
    if config.sequence_cap is not None:
        product = sequence_sum(log_rho, x.mask).clamp(-LIMIT, LIMIT).exp()
        weights = weights * product.clamp(max=config.sequence_cap)[:, None]
    if config.token_range is not None:
        weights = weights * _inside(log_rho.exp(), config.token_range)
    if config.geometric_range is not None:
        weights = weights * _inside(sequence_mean(log_rho, x.mask).exp(), config.geometric_range)[:, None]
    weights = torch.where(x.expert > 0, torch.ones_like(weights), weights)
    rolled_out = x.mask * (1 - x.expert)
    report = {
        "correction/weight": masked_sum(weights.expand_as(x.mask), rolled_out),
        "correction/left_out": masked_sum((weights == 0).expand_as(x.mask), rolled_out),
    }
    return decoupled, weights, report


def decouples(config: RolloutCorrectionConfig, proximal: torch.Tensor | np.ndarray | None) -> bool:
    """Returns True if the loss's ratio is relative to the trainer's weights before the step.

    By default that is so for a batch of several updates, which has `proximal` log-probabilities.
    """
    return proximal is not None if config.decoupled is None else config.decoupled


def _inside(ratio: torch.Tensor, limits: tuple[float, float]) -> torch.Tensor:
    return ((ratio >= limits[0]) & (ratio <= limits[1])).to(ratio.dtype)
