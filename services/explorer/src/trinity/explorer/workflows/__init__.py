"""Workflows by name."""

from trinity.explorer.workflows.base import Toolbox, Workflow
from trinity.explorer.workflows.single_turn import MathWorkflow, SimpleWorkflow

WORKFLOWS: dict[str, type[Workflow]] = {
    "simple_workflow": SimpleWorkflow,
    "math_workflow": MathWorkflow,
}

__all__ = ["WORKFLOWS", "Toolbox", "Workflow"]
