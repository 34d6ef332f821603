"""Policy losses in Trinity-RFT's form."""

from trinity.algorithm.policy_loss_fn.policy_loss_fn import POLICY_LOSS_FN, PolicyLossFn

__all__ = ["POLICY_LOSS_FN", "PolicyLossFn"]
