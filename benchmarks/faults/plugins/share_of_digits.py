"""The graded reward for Trinity. Every service imports this file, so the trainer's process is probed."""

import probe
from grader import grade

from trinity.plugins import reward_function


def record_updates(gradients):
    """Wraps the update of one rank, which does not call the optimizer's step."""
    gradients.OneRankUpdate._step = probe.steps_of(gradients.OneRankUpdate._step, lambda update: update._optimizer)


probe.install(**{"trinity.trainer.engine.gradients": record_updates})


@reward_function("share_of_digits")
def share_of_digits(item, args):
    """Grades one response to a numbered row."""
    return grade(item.task["row"], item.response, item.token_ids)
