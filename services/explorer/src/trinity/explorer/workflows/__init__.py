"""Workflows by name."""

from typing import Any

from trinity import plugins
from trinity.explorer.workflows.agents import ExternalAgentWorkflow
from trinity.explorer.workflows.base import Toolbox, Workflow
from trinity.explorer.workflows.distill import DistillMathWorkflow, DistillWorkflow
from trinity.explorer.workflows.environments import ENVIRONMENT_WORKFLOWS
from trinity.explorer.workflows.players import PlayersWorkflow
from trinity.explorer.workflows.single_turn import (
    MathBoxedWorkflow,
    MathEvalWorkflow,
    MathRewardModelWorkflow,
    MathWorkflow,
    SimpleMMWorkflow,
    SimpleWorkflow,
)
from trinity.explorer.workflows.thinking import ThinkingBudgetWorkflow
from trinity.explorer.workflows.tool_calls import ToolCallWorkflow
from trinity.explorer.workflows.traffic import TrafficWorkflow
from trinity.plugins import satellites

# Trinity-RFT has these a second time as async_*: here all are.
_SINGLE_TURN: dict[str, type[Workflow]] = {
    "simple_workflow": SimpleWorkflow,
    "simple_mm_workflow": SimpleMMWorkflow,
    "math_workflow": MathWorkflow,
    "math_boxed_workflow": MathBoxedWorkflow,
    "math_eval_workflow": MathEvalWorkflow,
    "math_rm_workflow": MathRewardModelWorkflow,
}

WORKFLOWS: dict[str, type[Workflow]] = {
    **_SINGLE_TURN,
    **{f"async_{name}": workflow for name, workflow in _SINGLE_TURN.items()},
    "on_policy_distill_workflow": DistillWorkflow,
    "on_policy_distill_math_workflow": DistillMathWorkflow,
    "tool_call_workflow": ToolCallWorkflow,
    "thinking_budget_workflow": ThinkingBudgetWorkflow,
    "external_agent_workflow": ExternalAgentWorkflow,
    "traffic_workflow": TrafficWorkflow,
    **ENVIRONMENT_WORKFLOWS,
    "players_workflow": PlayersWorkflow,
}


def find_workflow(name: str) -> type[Workflow] | None:
    """Returns a built-in workflow, one of a plugin or of Trinity-RFT, or None for an unknown name."""
    found: Any = WORKFLOWS.get(name) or plugins.WORKFLOWS.get(name)
    if name in WORKFLOWS or (of_rft := satellites.find("workflows")) is None:
        return found
    return of_rft.adapted(found) if found else of_rft.WORKFLOWS.get(name)


__all__ = ["WORKFLOWS", "Toolbox", "Workflow", "find_workflow"]
