"""explorer.over_rollout: settings in which a step cannot leave out tasks, or never does."""

from collections.abc import Iterator

from trinity.config.errors import Problem
from trinity.config.plan import make_plan
from trinity.config.schema import Config

_RATIO = "explorer.over_rollout.ratio"
_OTHERS = {
    "arrival": "sample_strategy staleness_control, whose steps take the groups that are stored first",
    "replay": "replay_buffer, whose steps take the groups that are there",
}


def check_over_rollout(config: Config) -> Iterator[Problem]:
    """Refuses it with policies that wait for no task."""
    ratio, policy = config.explorer.over_rollout.ratio, make_plan(config).policy
    if ratio > 0 and policy in _OTHERS:
        yield Problem(_RATIO, f"is {ratio:g} beside {_OTHERS[policy]}: use one of them")


def over_rollout_advice(config: Config) -> Iterator[str]:
    """Mentions a ratio of less than one task, and a ratio in a YAML that does not decide it."""
    ratio, plan = config.explorer.over_rollout.ratio, make_plan(config)
    if ratio > 0 and config.mode == "explore":
        yield f"{_RATIO}: has no effect in mode explore: the run's buffer decides it, by the YAML of mode train"
    elif ratio > 0 and plan.fewest_groups == plan.groups_per_step:
        yield f"{_RATIO}: has no effect: {ratio:g} of {plan.groups_per_step} tasks is less than one"
