"""Policy losses by the names of the YAML.

A loss is `name(x, share, **args) -> (loss, report)`: x are the tensors of a micro-batch, `share` makes token losses to
this micro-batch's share of the batch's loss, and arguments and defaults are those of trinity.config. In the formulas lp
is the log-probability of a token under the policy, lo under the policy that sampled it, r = exp(lp - lo) with the
exponent clamped to +-20, A the advantage, sg the stop-gradient.
"""

from collections.abc import Callable

import torch

from trinity.trainer.algorithms.policy_losses import (
    cispo,
    covariance,
    dpo,
    gmpo,
    gspo,
    importance_sampling,
    m2po,
    mix,
    opmd,
    ppo,
    rec,
    sapo,
    sft,
    sppo,
    topr,
)
from trinity.trainer.algorithms.report import Report

PolicyLossFn = Callable[..., tuple[torch.Tensor, Report]]

POLICY_LOSSES: dict[str, PolicyLossFn] = {
    "ppo": ppo.ppo,
    "gspo": gspo.gspo,
    "cispo": cispo.cispo,
    "sapo": sapo.sapo,
    "gmpo": gmpo.gmpo,
    "clip_cov": covariance.clip_cov,
    "kl_cov": covariance.kl_cov,
    "topr": topr.topr,
    "sppo": sppo.sppo,
    "rec": rec.rec,
    "opmd": opmd.opmd,
    "opmd_kimi": opmd.opmd_kimi,
    "opmd_pairwise": opmd.opmd_pairwise,
    "importance_sampling": importance_sampling.importance_sampling,
    "m2po": m2po.m2po,
    "dpo": dpo.dpo,
    "sft": sft.sft,
    "sft_is": sft.sft_is,
    "sft_phi": sft.sft_phi,
    "mix": mix.mix,
    "mix_chord": mix.mix_chord,
}
