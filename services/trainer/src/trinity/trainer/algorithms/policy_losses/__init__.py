"""Policy losses by the names of the YAML, one short file each; importing this package registers them.

A loss is `name(x, share, **args) -> (loss, report)`: x are the tensors of a micro-batch, `share` makes token losses to
this micro-batch's share of the batch's loss. In the formulas lp is the log-probability of a token under the policy, lo
under the sampling policy, ref under the base model, r = exp(lp - lo) with the exponent clamped to +-20, A the
advantage, sg the stop-gradient.
"""

from trinity.plugins.declarations import POLICY_LOSSES, import_modules

__all__ = ["POLICY_LOSSES"]

import_modules(__name__)
