"""Learning from a teacher: the algorithm needs a workflow that calls a teacher, a teacher, and temperature 1."""

from collections.abc import Iterator

from trinity.config.algorithms import resolvable, resolve
from trinity.config.errors import Problem
from trinity.config.memory import vocabulary_of
from trinity.config.schema import Config
from trinity.config.schema.buffer import TasksetConfig
from trinity.config.workflows import WORKFLOWS

POLICY = "policy"  # as a teacher's name: the policy itself
TEACHER_WORKFLOWS = ("on_policy_distill_workflow", "on_policy_distill_math_workflow")


def teachers(config: Config) -> set[str]:
    """Returns the auxiliary models that score trained tasks; an empty name stands for the first that writes."""
    return {_teacher(taskset) for _, taskset, workflow in _trained(config) if workflow in TEACHER_WORKFLOWS} - {POLICY}


def check_teacher(config: Config) -> Iterator[Problem]:
    """Checks built-in workflows; a workflow of a plugin may call a teacher too."""
    if not resolvable(config.algorithm):
        return
    plan = resolve(config.algorithm)
    if plan.advantage is not None and "teacher" in plan.advantage_traits:
        name = plan.advantage.name
    elif plan.teacher_top:
        name, known = plan.policy_loss.name, vocabulary_of(config.model.model_path)
        if 0 < known < plan.teacher_top:
            yield Problem("algorithm.policy_loss_fn_args.top_k", f"is {plan.teacher_top}, the model has {known} tokens")
    else:
        return
    for key, taskset, workflow in _trained(config):
        if workflow in WORKFLOWS and workflow not in TEACHER_WORKFLOWS:
            problem = f"is {workflow!r}, which asks no teacher; {name} needs {' or '.join(TEACHER_WORKFLOWS)}"
            yield Problem(f"buffer.explorer_input.{key}.default_workflow_type", problem)
        elif workflow in TEACHER_WORKFLOWS and not config.explorer.auxiliary_models and _teacher(taskset) != POLICY:
            problem = f"is empty; {workflow} asks the teacher there, a model with the policy's tokenizer"
            yield Problem("explorer.auxiliary_models", problem)
        own = taskset.rollout_args.temperature
        temperature = config.model.temperature if own is None else own
        if workflow in TEACHER_WORKFLOWS and temperature != 1:
            place = "model" if own is None else f"buffer.explorer_input.{key}.rollout_args"
            problem = f"is {temperature}, but {workflow} asks its teacher at temperature 1; sample at 1 too"
            yield Problem(f"{place}.temperature", problem)


def _teacher(taskset: TasksetConfig) -> str:
    return str(taskset.workflow_args.get("teacher") or "")


def _trained(config: Config) -> Iterator[tuple[str, TasksetConfig, str]]:
    """Yields key, taskset and workflow of each trained taskset."""
    source = config.buffer.explorer_input
    for key, taskset in source.by_key():
        if not key.startswith("eval"):
            yield key, taskset, source.workflow_of(taskset)
