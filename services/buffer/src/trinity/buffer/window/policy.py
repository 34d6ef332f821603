"""The policy of the YAML by which stored groups become batches.

fifo: in the order of tasks; a batch waits for its slowest task, so nothing is dropped by age or by length. With
explorer.over_rollout it may go without some: they are cut.
arrival: in the order of storing.
replay: by priority; a used group comes back after a cool-down.
With fifo and arrival, a group that the sample strategy refuses at its step is dropped.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from trinity.config import Plan
from trinity.config.algorithms import Part
from trinity.config.names import PRIORITY_ARGS
from trinity.plugins import NonNegative, sample_strategy
from trinity.plugins.declarations import SAMPLE_STRATEGIES
from trinity.runtime.errors import InvalidInput


@dataclass(frozen=True)
class Candidate:
    """A stored group that a step might train, as a sample strategy sees it.

    staleness_steps: as docs/staleness.md counts it, without the steps whose versions were rejected.
    """

    staleness_steps: int
    num_experiences: int
    num_response_tokens: int
    reward_mean: float


@sample_strategy("default", also=["warmup", "dpo"])
def default(group: Candidate) -> bool:
    """All groups in the order of tasks; a batch waits for its slowest."""
    return True


@sample_strategy("staleness_control", traits=["arrival"])
def staleness_control(group: Candidate, *, staleness_limit: NonNegative | None = None) -> bool:
    """Groups in the order they are stored, without those older than staleness_limit."""
    return staleness_limit is None or group.staleness_steps <= staleness_limit


@sample_strategy("mix")
def mix(
    group: Candidate,
    *,
    expert_data_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5,
    sft_dataset_name: str = "sft_dataset",
) -> bool:
    """Takes groups as `default` does; expert rows of an auxiliary buffer are mixed in (ledger.auxiliary)."""
    return True


def _keeps(strategy: Part) -> Callable[[Candidate], bool]:
    """The strategy with its arguments."""

    def keeps(group: Candidate) -> bool:
        try:
            kept: Any = SAMPLE_STRATEGIES[strategy.name](group, **strategy.args)
        except Exception as error:  # one of a plugin may raise anything
            raise InvalidInput("algorithm.sample_strategy", f"{strategy.name} raised {error!r} for {group}") from error
        if kept not in (True, False):
            raise InvalidInput("algorithm.sample_strategy", f"{strategy.name} returned {kept!r:.80}, must be a bool")
        return bool(kept)

    return keeps


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
        """Returns True if a group may be used again after `use_count` uses."""
        return self.use_count_limit is None or use_count < self.use_count_limit


@dataclass(frozen=True)
class Policy:
    """`groups_per_step` P; `capacity` in groups; `lockstep` in optimizer steps, 0 for none.

    A batch of fewer than P groups, but of `fewest_groups` at least, may be made `wait_after_min_seconds` after these
    are there; None: all P.

    With replay and a lockstep of I, the trainer is at most one interval of I steps ahead of the explorers, as it would
    be if both met at every synchronisation.
    """

    groups_per_step: int
    kind: Literal["fifo", "arrival", "replay"] = "fifo"
    fewest_groups: int | None = None
    wait_after_min_seconds: float = 0.0
    keeps: Callable[[Candidate], bool] = default
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
    args = {name: one.default for name, one in PRIORITY_ARGS[replay.priority_fn].items()} | replay.priority_fn_args
    kind = plan.policy
    assert kind in ("fifo", "arrival", "replay")
    fixed = plan.config.synchronizer.sync_style == "fixed"
    return Policy(
        groups_per_step=plan.groups_per_step,
        kind=kind,  # type: ignore[arg-type]
        fewest_groups=plan.fewest_groups if plan.fewest_groups < plan.groups_per_step else None,
        wait_after_min_seconds=plan.config.explorer.over_rollout.wait_after_min,
        keeps=_keeps(strategy),
        priority=Priority(float(args["decay"]), float(args.get("sigma", 0.0)), args.get("use_count_limit")),
        reuse_cooldown_seconds=replay.reuse_cooldown_time,
        capacity=max(1, source.capacity // plan.config.algorithm.repeat_times),
        lockstep=plan.staleness.interval if kind == "replay" and fixed else 0,
    )
