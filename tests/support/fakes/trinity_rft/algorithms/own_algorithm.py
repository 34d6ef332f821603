"""An algorithm in Trinity-RFT's form, with a part of every kind."""

from typing import Dict, List, Tuple  # noqa: UP035

from trinity.algorithm.advantage_fn import ADVANTAGE_FN, GroupAdvantage
from trinity.algorithm.algorithm import ALGORITHM_TYPE, AlgorithmType
from trinity.algorithm.entropy_loss_fn import ENTROPY_LOSS_FN, EntropyLossFn
from trinity.algorithm.kl_fn import KL_FN, KLFn
from trinity.algorithm.policy_loss_fn import POLICY_LOSS_FN, PolicyLossFn
from trinity.algorithm.utils import aggregate_loss, masked_mean
from trinity.common.experience import Experience, group_by


@POLICY_LOSS_FN.register_module("faded")
class FadedLoss(PolicyLossFn):
    """Fades where the ratio leaves 1."""

    def __init__(self, backend: str = "verl", width: float = 0.2, loss_agg_mode: str = "token-mean") -> None:
        super().__init__(backend=backend)
        self.width, self.loss_agg_mode = width, loss_agg_mode

    def __call__(self, logprob, old_logprob, action_mask, advantages, **kwargs):
        ratio = (logprob - old_logprob).exp()
        gate = (-((ratio.detach() - 1) / self.width).square()).exp()
        loss = aggregate_loss(-advantages * ratio * gate, action_mask, self.loss_agg_mode)
        return loss, {"gate": masked_mean(gate, action_mask).item()}

    @classmethod
    def default_args(cls) -> Dict:  # noqa: UP006
        return {"width": 0.5}


@ADVANTAGE_FN.register_module("above_worst")
class AboveWorst(GroupAdvantage):
    """R - the worst of the group; the worst ones are left out."""

    def __init__(self, keep_worst: bool = False, **kwargs) -> None:
        super().__init__(**kwargs)
        self.keep_worst = keep_worst

    def group_experiences(self, exps):
        return group_by(exps, id_type="task")

    def calculate_group_advantage(
        self,
        group_id: str,
        exps: List[Experience],  # noqa: UP006
    ) -> Tuple[List[Experience], Dict]:  # noqa: UP006
        worst = min(exp.reward for exp in exps)
        for exp in exps:
            exp.advantages = (exp.reward - worst) * exp.action_mask
            exp.returns = exp.advantages.clone()
        return [exp for exp in exps if self.keep_worst or exp.reward > worst], {"worst": worst}


@KL_FN.register_module("half_square")
class HalfSquare(KLFn):
    """Half the squared difference."""

    def calculate_kl(self, logprob, ref_logprob, old_logprob=None):
        return 0.5 * (logprob - ref_logprob).square()


@ENTROPY_LOSS_FN.register_module("plain_entropy")
class PlainEntropy(EntropyLossFn):
    """The mean entropy."""

    def __init__(self, entropy_coef: float) -> None:
        self.entropy_coef = entropy_coef

    def __call__(self, entropy, action_mask, **kwargs):
        mean = masked_mean(entropy, action_mask)
        return mean * self.entropy_coef, {"entropy_loss": mean.item()}

    @classmethod
    def default_args(cls):
        return {"entropy_coef": 0.0}


@ALGORITHM_TYPE.register_module("faded_worst")
class FadedWorst(AlgorithmType):
    use_critic = False
    use_reference = True
    compute_advantage_in_trainer = False
    can_balance_batch = True
    schema = "experience"

    @classmethod
    def default_config(cls):
        return {
            "repeat_times": 4,
            "advantage_fn": "above_worst",
            "policy_loss_fn": "faded",
            "policy_loss_fn_args": {"width": 0.3},
            "kl_penalty_fn": "none",
            "kl_loss_fn": "half_square",
            "entropy_loss_fn": "plain_entropy",
            "sample_strategy": "default",
        }
