"""explorer.traffic: a run whose tasks are rewarded calls, and the keys that this leaves no meaning."""

from collections.abc import Iterator

from trinity.config.errors import Problem
from trinity.config.plan import make_plan
from trinity.config.schema import Config

KEY = "explorer.traffic"


def check_traffic(config: Config) -> Iterator[Problem]:
    """Refuses it without an endpoint, beside tasksets, and with algorithms or bounds that could train no such call."""
    if config.explorer.traffic is None:
        return
    if not config.explorer.record:
        yield Problem("explorer.record", f"is false, and {KEY} records calls at the endpoint; set it to true")
    if config.explorer.traffic.trial is not None and (config.model.lora is None or config.model.lora.merged):
        problem = "needs engines that hold two versions: set model.lora_configs.0.merged to false, or remove it"
        yield Problem(f"{KEY}.trial", problem)
    if config.mode not in ("both", "train"):
        return
    source, repeat = config.buffer.explorer_input, config.algorithm.repeat_times
    if source.taskset is not None or source.tasksets:
        problem = f"is given beside {KEY}: all tasks of such a run are rewarded calls; remove one of them"
        yield Problem(f"buffer.explorer_input.{'taskset' if source.taskset else 'tasksets'}", problem)
    if repeat != 1:
        yield Problem("algorithm.repeat_times", f"is {repeat}; {KEY} has one reply for each call: set it to 1")
    plan = make_plan(config)
    if plan.total_steps is None:
        yield Problem("buffer.total_steps", f"is missing; calls of {KEY} come as long as the run lasts")
    needed, kept = plan.staleness.bound // plan.staleness.interval + 3, config.synchronizer.versions_to_keep
    traffic = config.explorer.traffic
    if traffic.guard is not None and traffic.trial is None and kept < needed:  # versions wait for their trial
        problem = f"is {kept}, and {KEY}.guard rolls back to versions that are no longer LIVE: at least {needed}"
        yield Problem("synchronizer.versions_to_keep", problem)
    if plan.staleness.bound == 0:
        problem = "is 0: a reward that comes after the next version would never be trained; raise it"
        yield Problem("synchronizer.sync_offset", problem)
