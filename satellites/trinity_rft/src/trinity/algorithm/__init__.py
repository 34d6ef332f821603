"""Trinity-RFT's registries of algorithms and their parts, mapped onto those of trinity.plugins: docs/from_trinity.md.

Importing it loads no torch; registered functions run in the trainer.
"""

from trinity.algorithm.advantage_fn import ADVANTAGE_FN
from trinity.algorithm.algorithm import ALGORITHM_TYPE
from trinity.algorithm.entropy_loss_fn import ENTROPY_LOSS_FN
from trinity.algorithm.kl_fn import KL_FN
from trinity.algorithm.policy_loss_fn import POLICY_LOSS_FN
from trinity.algorithm.sample_strategy import SAMPLE_STRATEGY

__all__ = ["ADVANTAGE_FN", "ALGORITHM_TYPE", "ENTROPY_LOSS_FN", "KL_FN", "POLICY_LOSS_FN", "SAMPLE_STRATEGY"]
