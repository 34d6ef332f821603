"""The environments that tasksets play: those of this process, their packages, and whether they repeat."""

from collections.abc import Iterator, Sequence
from typing import Any

from trinity import plugins
from trinity.cli.supervise.checks.task_rows import names_for
from trinity.config import Plan, Problem
from trinity.config.names import reward_named
from trinity.config.schema.buffer import TasksetConfig
from trinity.config.workflows import EPISODE_WORKFLOWS, R3L_WORKFLOWS
from trinity.data.datasets import Row
from trinity.plugins.environments import built_in_environments, installed_environments, unplayable


def missing_packages(plan: Plan) -> Iterator[Problem]:
    """Yields problems of built-in environments that the run's environment service, started here, could not play."""
    provided = {one.name for one in plan.config.explorer.environments}
    for key, taskset in plan.config.buffer.explorer_input.by_key() if plan.config.mode in ("both", "bench") else []:
        workflow, _ = names_for(plan, f".{key}", taskset)
        for name in {name for name, _, _ in episodes_of(workflow, taskset.workflow_args)} - provided:
            if problem := unplayable(built_in_environments().get(name)):
                place = f"buffer.explorer_input.{key}.workflow_args.environment"
                yield Problem(place, f"{name!r} cannot be played here: {problem}")


def check_repeatable(plan: Plan, key: str, taskset: TasksetConfig, rows: Sequence[Row]) -> Iterator[Problem]:
    """With reproducible: true, yields components of a taskset that are declared non-deterministic."""
    workflow, reward = names_for(plan, key, taskset)
    form = taskset.format
    rewards = {reward_named(str(row.get(form.reward_fn_key) or reward)) for row in rows}
    workflows = {workflow, *(str(row.get(form.workflow_key) or workflow) for row in rows if form.workflow_key)}
    used = [("default_workflow_type", name) for name in workflows if plugins.WORKFLOWS.get(name) in plugins.RANDOM]
    used += [("default_reward_fn_type", n) for n in rewards if plugins.REWARD_FUNCTIONS.get(n) in plugins.RANDOM]
    for where, name in sorted(used):
        yield Problem(f"{key}.{where}", f"uses {name!r}, which declares random=True; remove it, or reproducible: true")
    for name in {name for one in workflows for name, _, _ in episodes_of(one, taskset.workflow_args)}:
        kind = playable_here().get(name)
        if kind is not None and not kind.description.deterministic:
            what = f"is {name!r}, which does not announce that it is deterministic; reproducible: true needs that"
            yield Problem(f"{key}.workflow_args.environment", what)


def playable_here() -> dict[str, Any]:
    """Returns the environments that this process can play."""
    return {**plugins.ENVIRONMENTS, **installed_environments(), **built_in_environments()}


def episodes_of(workflow: str, given: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields (environment, key of its arguments, arguments) for each kind of episode that a built-in workflow plays."""
    if workflow == "tool_call_workflow" and given.get("environment"):
        yield given["environment"], "environment_args", given.get("environment_args", {})
    rules = {**EPISODE_WORKFLOWS, **R3L_WORKFLOWS}.get(workflow)
    if rules is None:
        return
    found = rules.with_args(given)
    yield found.environment, "environment_args", found.environment_args
    if workflow in R3L_WORKFLOWS and (again := given.get("retry_environment_args")):
        yield found.environment, "retry_environment_args", {**found.environment_args, **again}
