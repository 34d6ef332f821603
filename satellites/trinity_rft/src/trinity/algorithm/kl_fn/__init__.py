"""KL estimates in Trinity-RFT's form."""

from trinity.algorithm.kl_fn.kl_fn import KL_FN, KLFn

__all__ = ["KL_FN", "KLFn"]
