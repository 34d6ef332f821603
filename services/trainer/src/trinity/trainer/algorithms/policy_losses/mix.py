"""Rolled-out sequences by PPO beside expert rows by SFT, each part a mean of its own."""

import math
from dataclasses import replace

import torch

from trinity.trainer.algorithms.aggregation import Share
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.policy_losses import ppo, sft
from trinity.trainer.algorithms.report import Report


def mix(
    x: LossInputs,
    share: Share,
    *,
    mu: float = 0.1,
    clip_range: float = 0.2,
    clip_range_low: float | None = None,
    clip_range_high: float | None = None,
    use_token_level_loss_in_sft: bool = False,
) -> tuple[torch.Tensor, Report]:
    """(1 - mu) PPO of the rolled-out + mu SFT of the expert sequences. CHORD, arXiv:2508.11408, with a constant mu."""
    clip = {"clip_range": clip_range, "clip_range_low": clip_range_low, "clip_range_high": clip_range_high}
    return _mixed(x, share, mu, clip, False, use_token_level_loss_in_sft)


def mix_chord(
    x: LossInputs,
    share: Share,
    *,
    mu_warmup_steps: int = 0,
    mu_decay_steps: int = 0,
    mu_peak: float = 0.1,
    mu_valley: float = 0.1,
    enable_phi_function: bool = True,
    clip_range: float = 0.2,
    clip_range_low: float | None = None,
    clip_range_high: float | None = None,
    use_token_level_loss_in_sft: bool = True,
) -> tuple[torch.Tensor, Report]:
    """(1 - mu) PPO of the rolled-out + mu sft_phi (or SFT) of the expert sequences. CHORD, arXiv:2508.11408.

    mu is `mu_at` of the step.
    """
    mu = mu_at(x.step, mu_warmup_steps, mu_decay_steps, mu_peak, mu_valley)
    clip = {"clip_range": clip_range, "clip_range_low": clip_range_low, "clip_range_high": clip_range_high}
    return _mixed(x, share, mu, clip, enable_phi_function, use_token_level_loss_in_sft)


def mu_at(step: int, warmup: int, decay: int, peak: float, valley: float) -> float:
    """Of optimizer step 1, 2, ...: linear from 0 to peak over `warmup` steps, half a cosine to valley over `decay`."""
    done = step - 1
    if done < warmup:
        return peak * done / warmup
    if done >= warmup + decay:
        return valley
    return valley + (peak - valley) * 0.5 * (1 + math.cos(math.pi * (done - warmup) / decay))


def _mixed(
    x: LossInputs, share: Share, mu: float, clip: dict[str, float | None], phi: bool, token_level: bool
) -> tuple[torch.Tensor, Report]:
    rolled_out, expert = replace(x, mask=x.mask * (1 - x.expert)), replace(x, mask=x.mask * x.expert)
    usual, report = ppo.ppo(rolled_out, share.among(share.totals.rolled_out), **clip)  # type: ignore[arg-type]
    learn = sft.sft_phi if phi else sft.sft
    taught, about = learn(expert, share.among(share.totals.expert), use_token_level_loss=token_level)
    constant = torch.tensor([mu, 1.0], device=x.mask.device)
    return (1 - mu) * usual + mu * taught, {**report, **about, "mu": constant}
