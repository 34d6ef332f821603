"""Workflows by name."""

from trinity import plugins
from trinity.explorer.workflows.base import Toolbox, Workflow
from trinity.explorer.workflows.single_turn import MathRewardModelWorkflow, MathWorkflow, SimpleWorkflow

WORKFLOWS: dict[str, type[Workflow]] = {
    "simple_workflow": SimpleWorkflow,
    "math_workflow": MathWorkflow,
    "math_rm_workflow": MathRewardModelWorkflow,
}


def find_workflow(name: str) -> type[Workflow] | None:
    """A built-in workflow, or one of a plugin."""
    return WORKFLOWS.get(name) or plugins.WORKFLOWS.get(name)


__all__ = ["WORKFLOWS", "Toolbox", "Workflow", "find_workflow"]
