"""PPO on rolled-out sequences plus SFT on expert rows, with a separate mean for each part."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from trinity.plugins import AggregationMode, Fraction, NonNegative, NonNegativeInt, algorithm, policy_loss
from trinity.trainer.algorithms.aggregation import Report, Share
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.policy_losses import ppo, sft


@policy_loss("mix", source="CHORD, arXiv:2508.11408", traits=["ratio", "experts"])
def mix(
    x: LossInputs,
    share: Share,
    *,
    mu: Fraction = 0.1,
    clip_range: NonNegative | None = 0.2,
    clip_range_low: NonNegative | None = None,
    clip_range_high: NonNegative | None = None,
    use_token_level_loss_in_sft: bool = True,
    sft_loss_agg_mode: AggregationMode | None = None,
    grpo_loss_agg_mode: AggregationMode | None = None,
) -> tuple[torch.Tensor, Report]:
    """(1 - mu) PPO of the rolled-out + mu SFT of the expert sequences.

    Each part is aggregated over its sequences, by its mode if one is given.
    """
    clip = {"clip_range": clip_range, "clip_range_low": clip_range_low, "clip_range_high": clip_range_high}
    modes = grpo_loss_agg_mode, sft_loss_agg_mode
    return _mixed(x, share, mu, clip, modes, sft.sft, use_token_level_loss_in_sft)


@policy_loss("mix_chord", source="CHORD, arXiv:2508.11408", traits=["ratio", "experts"])
def mix_chord(
    x: LossInputs,
    share: Share,
    *,
    mu_warmup_steps: NonNegativeInt = 0,
    mu_decay_steps: NonNegativeInt = 0,
    mu_peak: Fraction = 0.1,
    mu_valley: Fraction = 0.1,
    enable_phi_function: bool = True,
    clip_range: NonNegative | None = 0.2,
    clip_range_low: NonNegative | None = None,
    clip_range_high: NonNegative | None = None,
    use_token_level_loss_in_sft: bool = True,
    sft_loss_agg_mode: AggregationMode | None = None,
    grpo_loss_agg_mode: AggregationMode | None = None,
) -> tuple[torch.Tensor, Report]:
    """(1 - mu) PPO of the rolled-out + mu sft_phi (or SFT) of the expert sequences, mu(step): linear 0
    to peak, half a cosine to valley, then valley.
    """
    mu = mu_at(x.step, mu_warmup_steps, mu_decay_steps, mu_peak, mu_valley)
    clip = {"clip_range": clip_range, "clip_range_low": clip_range_low, "clip_range_high": clip_range_high}
    modes = grpo_loss_agg_mode, sft_loss_agg_mode
    learn = sft.sft_phi if enable_phi_function else sft.sft
    return _mixed(x, share, mu, clip, modes, learn, use_token_level_loss_in_sft)


def mu_at(step: int, warmup: int, decay: int, peak: float, valley: float) -> float:
    """mu of step 1, 2, ...: linear from 0 to peak over `warmup` steps, half a cosine to valley over `decay`."""
    done = step - 1
    if done < warmup:
        return peak * done / warmup
    if done >= warmup + decay:
        return valley
    return valley + (peak - valley) * 0.5 * (1 + math.cos(math.pi * (done - warmup) / decay))


def _mixed(
    x: LossInputs,
    share: Share,
    mu: float,
    clip: dict[str, float | None],
    modes: tuple[str | None, str | None],
    learn: Callable[..., tuple[torch.Tensor, Report]],
    token_level: bool,
) -> tuple[torch.Tensor, Report]:
    """modes: aggregation of the rolled-out and of the expert sequences; None: the share's mode, and by token_level."""
    rolled_out, expert = replace(x, mask=x.mask * (1 - x.expert)), replace(x, mask=x.mask * x.expert)
    theirs, experts = (
        share.among(part).by(mode or share.mode)
        for part, mode in zip((share.totals.rolled_out, share.totals.expert), modes, strict=True)
    )
    usual, report = ppo.ppo(rolled_out, theirs, **clip)  # type: ignore[arg-type]
    taught, about = learn(expert, experts, use_token_level_loss=token_level or modes[1] is not None)
    constant = torch.tensor([mu, 1.0], device=x.mask.device)
    return (1 - mu) * usual + mu * taught, {**report, **about, "mu": constant}


algorithm(
    "mix", policy_loss="mix", advantage="grpo", kl_loss="k2", entropy_loss="mix", sample_strategy="mix", repeat_times=8
)
algorithm(
    "mix_chord",
    policy_loss="mix_chord",
    advantage="grpo",
    kl_loss="k2",
    entropy_loss="mix",
    sample_strategy="mix",
    repeat_times=8,
)
