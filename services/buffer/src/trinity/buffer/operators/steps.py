"""Rollouts of several steps."""

from dataclasses import replace

from trinity.buffer.operators.base import Draft, rollouts
from trinity.data.experience import Task


class MultiStepPadding:
    """Every rollout of the group gets the same number of experiences: its last step again, masked, as often as needed.

    That number is `max_steps`, or with 0 that of the group's longest rollout; longer rollouts stay as they are. A
    repeated step trains nothing and has the last step's reward, so a mean over the group's experiences counts every
    rollout the same, however many steps it took.
    """

    def __init__(self, max_steps: int = 0) -> None:
        self._steps = max_steps

    def __call__(self, drafts: list[Draft], task: Task) -> None:
        found = rollouts(drafts)
        wanted = self._steps or max(len(rollout.drafts) for rollout in found)
        for rollout in found:
            drafts += [replace(rollout.last, masked=True) for _ in range(wanted - len(rollout.drafts))]
