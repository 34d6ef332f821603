"""Advantage functions by the names of the YAML: from a batch's rollouts to an advantage for every token.

A function is `name(rollouts, **args) -> Advantages`; its arguments and defaults are those of trinity.config.
"""

from collections.abc import Callable
from typing import Any

from trinity.trainer.algorithms.advantages.asymmetric import asymre
from trinity.trainer.algorithms.advantages.balanced import rec
from trinity.trainer.algorithms.advantages.distillation import jsd, on_policy_distill
from trinity.trainer.algorithms.advantages.generalized import ppo
from trinity.trainer.algorithms.advantages.group_in_group import gigpo
from trinity.trainer.algorithms.advantages.group_relative import grpo, of_grpo
from trinity.trainer.algorithms.advantages.mirror_descent import opmd
from trinity.trainer.algorithms.advantages.plain_returns import reinforce, reinforceplusplus, remax, rloo
from trinity.trainer.algorithms.advantages.reweighted import grpo_reweight_adv, opmd_reweight_adv
from trinity.trainer.algorithms.advantages.rollouts import Advantages, Rollouts
from trinity.trainer.algorithms.advantages.step_wise import step_wise_grpo

__all__ = ["ADVANTAGES", "AdvantageFn", "Advantages", "Rollouts", "compute", "grpo"]

AdvantageFn = Callable[..., Advantages]

ADVANTAGES: dict[str, AdvantageFn] = {
    "grpo": of_grpo,
    "grpo_verl": of_grpo,
    "grpo_reweight_adv": grpo_reweight_adv,
    "step_wise_grpo": step_wise_grpo,
    "gigpo": gigpo,
    "ppo": ppo,
    "reinforceplusplus": reinforceplusplus,
    "reinforce": reinforce,
    "remax": remax,
    "rloo": rloo,
    "opmd": opmd,
    "opmd_verl": opmd,
    "opmd_reweight_adv": opmd_reweight_adv,
    "asymre": asymre,
    "asymre_verl": asymre,
    "rec": rec,
    "on_policy_distill": on_policy_distill,
    "jsd": jsd,
}


def compute(name: str, args: dict[str, Any], rollouts: Rollouts) -> Advantages:
    return ADVANTAGES[name](rollouts, **args)
