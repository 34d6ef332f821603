"""reproducible: true, and the keys that would break its promise."""

from collections.abc import Iterator

from trinity.config.errors import Problem
from trinity.config.plan import make_plan
from trinity.config.schema import Config
from trinity.plugins.declarations import SELECTORS

KEY = "reproducible"


def check_reproducible(config: Config) -> Iterator[Problem]:
    """Refuses keys whose effect depends on clocks, on the order of events, or on programs elsewhere."""
    if not config.reproducible:
        return
    explorer, sync, plan = config.explorer, config.synchronizer, make_plan(config)
    engine, lag = explorer.rollout_model, plan.staleness
    chosen = {taskset.data_selector.selector_type for taskset in plan.tasksets}
    learning = sorted(name for name in chosen if name in SELECTORS and "rewards" in SELECTORS[name].traits)
    refused = (
        (config.mode in ("serve", "bench"), f"goes with the modes both, explore and train, not with {config.mode}"),
        (explorer.record, "does not go with explorer.record: agents outside answer when they like"),
        (explorer.dynamic_timeout.enable, "does not go with explorer.dynamic_timeout: clocks decide what it cuts"),
        (explorer.over_rollout.ratio > 0, "does not go with explorer.over_rollout: clocks decide what it cuts"),
        (bool(explorer.environments), "does not go with explorer.environments: providers elsewhere may be random"),
        (bool(explorer.auxiliary_models), "does not go with explorer.auxiliary_models: their engines batch requests"),
        (bool(engine.engine_args), "does not go with explorer.rollout_model.engine_args: they may change results"),
        (plan.policy == "replay", "does not go with replay_buffer: priorities follow from when groups are stored"),
        (
            plan.policy == "arrival",
            "does not go with staleness_control, which takes the groups that are stored first",
        ),
        (
            bool(learning),
            f"does not go with the data_selector {', '.join(learning)}: it learns from rewards when groups are stored",
        ),
        (sync.on_rejected == "continue", "does not go with synchronizer.on_rejected: continue"),
    )
    for applies, problem in refused:
        if applies:
            yield Problem(KEY, f"is true, which {problem}")
    needed = -(-lag.offset // lag.interval) + 2
    if sync.versions_to_keep < needed:
        problem = f"is {sync.versions_to_keep}; with {KEY}: true a task may need an older version: at least {needed}"
        yield Problem("synchronizer.versions_to_keep", problem)
