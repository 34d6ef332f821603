"""Entropy losses in Trinity-RFT's form."""

from trinity.algorithm.entropy_loss_fn.entropy_loss_fn import ENTROPY_LOSS_FN, EntropyLossFn

__all__ = ["ENTROPY_LOSS_FN", "EntropyLossFn"]
