"""How stored groups become batches, as the YAML says it.

fifo: in the order of tasks; a batch waits for its slowest task, so nothing is dropped by age or by length.
arrival: in the order of storing; a group that is older than `staleness_limit` at its step is dropped.
replay: by priority; a used group comes back after a cool-down.
"""

import random
from dataclasses import dataclass
from typing import Literal

from trinity.config import Plan

_NAMES = ("linear_decay", "linear_decay_use_count_control_randomization")


@dataclass(frozen=True)
class Priority:
    """The higher the sooner: weight version - decay * use count (+ noise of standard deviation `sigma`).

    A group is used `use_count_limit` times at most; None: as often as its priority allows.
    """

    decay: float = 2.0
    sigma: float = 0.0
    use_count_limit: int | None = None

    def of(self, version: int, use_count: int, ordinal: int) -> float:
        """The noise belongs to the group and its use count, so that every reader finds the same."""
        noise = random.Random(f"{ordinal}/{use_count}").gauss(0.0, self.sigma) if self.sigma else 0.0
        return version - self.decay * use_count + noise

    def allows(self, use_count: int) -> bool:
        """Whether a group may be used again after so many uses."""
        return self.use_count_limit is None or use_count < self.use_count_limit


@dataclass(frozen=True)
class Policy:
    """`groups_per_step` P; `capacity` in groups; `lockstep` in optimizer steps, 0 for none.

    With replay and a lockstep of I, the trainer is at most one interval of I steps ahead of the explorers, as it would
    be if both met at every synchronisation.
    """

    groups_per_step: int
    kind: Literal["fifo", "arrival", "replay"] = "fifo"
    staleness_limit: float | None = None
    priority: Priority = Priority()
    reuse_cooldown_seconds: float | None = None
    capacity: int = 10_000
    lockstep: int = 0

    def must_have_arrived(self, step: int) -> int:
        """Groups that must have come into the pool before the batch of a step is chosen."""
        if not self.lockstep:
            return 0
        return (step - 1) // self.lockstep * self.lockstep * self.groups_per_step


def policy_of(plan: Plan) -> Policy:
    """The policy of an online run."""
    source, strategy = plan.experience_buffer, plan.algorithm.sample_strategy
    replay = source.replay_buffer
    args = {"decay": 2.0, "sigma": 0.0} | replay.priority_fn_args
    limit = args.get("use_count_limit", 3) if replay.priority_fn == _NAMES[1] else None
    kind = plan.policy
    assert kind in ("fifo", "arrival", "replay")
    fixed = plan.config.synchronizer.sync_style == "fixed"
    return Policy(
        groups_per_step=plan.groups_per_step,
        kind=kind,  # type: ignore[arg-type]
        staleness_limit=strategy.args.get("staleness_limit") if kind == "arrival" else None,
        priority=Priority(float(args["decay"]), float(args["sigma"]), limit),
        reuse_cooldown_seconds=replay.reuse_cooldown_time,
        capacity=max(1, source.capacity // plan.config.algorithm.repeat_times),
        lockstep=plan.staleness.interval if kind == "replay" and fixed else 0,
    )
