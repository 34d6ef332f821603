"""Learning from a teacher: its advantage needs a workflow that calls a teacher, a teacher, and temperature 1."""

from collections.abc import Iterator

from trinity.config.errors import Problem
from trinity.config.schema import Config
from trinity.config.schema.buffer import TasksetConfig
from trinity.config.workflows import WORKFLOWS
from trinity.plugins.declarations import ADVANTAGES, ALGORITHMS

TEACHER_WORKFLOWS = ("on_policy_distill_workflow", "on_policy_distill_math_workflow")


def teachers(config: Config) -> set[str]:
    """Returns the auxiliary models that score trained tasks; an empty name stands for the first that writes."""
    return {str(taskset.workflow_args.get("teacher") or "") for _, taskset, workflow in _trained(config)
            if workflow in TEACHER_WORKFLOWS}  # fmt: skip


def check_teacher(config: Config) -> Iterator[Problem]:
    """Checks built-in workflows; a workflow of a plugin may call a teacher too."""
    algorithm = config.algorithm
    name = algorithm.advantage_fn or ALGORITHMS[algorithm.algorithm_type].advantage
    if name is None or name not in ADVANTAGES or "teacher" not in ADVANTAGES[name].traits:
        return
    for key, taskset, workflow in _trained(config):
        if workflow in WORKFLOWS and workflow not in TEACHER_WORKFLOWS:
            problem = f"is {workflow!r}, which asks no teacher; {name} needs {' or '.join(TEACHER_WORKFLOWS)}"
            yield Problem(f"buffer.explorer_input.{key}.default_workflow_type", problem)
        elif workflow in TEACHER_WORKFLOWS and not config.explorer.auxiliary_models:
            problem = f"is empty; {workflow} asks the teacher there, a model with the policy's tokenizer"
            yield Problem("explorer.auxiliary_models", problem)
        own = taskset.rollout_args.temperature
        temperature = config.model.temperature if own is None else own
        if workflow in TEACHER_WORKFLOWS and temperature != 1:
            place = "model" if own is None else f"buffer.explorer_input.{key}.rollout_args"
            problem = f"is {temperature}, but {workflow} asks its teacher at temperature 1; sample at 1 too"
            yield Problem(f"{place}.temperature", problem)


def _trained(config: Config) -> Iterator[tuple[str, TasksetConfig, str]]:
    """Yields key, taskset and workflow of each trained taskset."""
    source = config.buffer.explorer_input
    for key, taskset in source.by_key():
        if not key.startswith("eval"):
            yield key, taskset, source.workflow_of(taskset)
