"""What a user adds: reward functions, workflows and experience operators, reached from the YAML by name.

    from trinity.plugins import reward_function

    @reward_function("short_reward")
    def short_reward(item, args):
        return 1.0 if len(item.response) < args.get("limit", 100) else 0.0

A reward function gets an item (prompt, response, truth, token_ids, truncated, response_tokens, task: the dataset's row)
and the YAML's reward_fn_args, and returns a number, or a mapping of parts whose sum is the reward. It runs in the
environment service. A workflow is a class as those in trinity.explorer.workflows; it runs in the explorer.

An experience operator gets the drafts of a group, its task and the YAML's args, and changes the drafts in place: their
reward, masked and metrics, or it drops them. It returns metrics, or nothing. It runs in the buffer service:

    @experience_operator("no_long_ones")
    def no_long_ones(drafts, task, args):
        for draft in drafts:
            if draft.experience.response_length > args.get("limit", 100):
                draft.drop()

It may be a class, too: made once with the args as keyword arguments, then called with drafts and task.

A tool is a function that the policy may call in tool_call_workflow; it runs in the explorer, in a thread of its own:

    @tool("weather", "The weather of a place.", {"place": {"type": "string"}})
    def weather(place):
        return f"It is sunny in {place}."
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

REWARD_FUNCTIONS: dict[str, Callable[..., Any]] = {}
WORKFLOWS: dict[str, type] = {}
EXPERIENCE_OPERATORS: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True)
class Tool:
    """`schema` is in the form that chat templates take: {type: function, function: {name, description, parameters}}."""

    schema: dict[str, Any]
    function: Callable[..., Any]


TOOLS: dict[str, Tool] = {}
_TOOL_FUNCTIONS: dict[str, Callable[..., Any]] = {}

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)


class PluginError(ValueError):
    """A plugin folder cannot be used; the message names file and cause."""


def reward_function(name: str) -> Callable[[_Function], _Function]:
    """Register a reward function for the YAML's default_reward_fn_type."""

    def register(function: _Function) -> _Function:
        _add(REWARD_FUNCTIONS, name, function)
        return function

    return register


def workflow(name: str) -> Callable[[_Class], _Class]:
    """Register a workflow for the YAML's default_workflow_type."""

    def register(kind: _Class) -> _Class:
        _add(WORKFLOWS, name, kind)
        return kind

    return register


def experience_operator(name: str) -> Callable[[_Function], _Function]:
    """Register an operator for the YAML's data_processor.experience_pipeline.operators."""

    def register(operator: _Function) -> _Function:
        _add(EXPERIENCE_OPERATORS, name, operator)
        return operator

    return register


def tool(name: str, description: str, parameters: dict[str, Any]) -> Callable[[_Function], _Function]:
    """Register a tool for tool_call_workflow's `tools`. `parameters`: a JSON schema for each argument, all required."""

    def register(function: _Function) -> _Function:
        schema = {"type": "object", "properties": parameters, "required": list(parameters)}
        made = {"name": name, "description": description, "parameters": schema}
        _add(_TOOL_FUNCTIONS, name, function)
        TOOLS[name] = Tool({"type": "function", "function": made}, function)
        return function

    return register


def _add(registry: dict[str, Any], name: str, what: Any) -> None:
    """One name, one meaning: that of another place is never replaced."""
    known = registry.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (what.__module__, what.__qualname__):
        raise PluginError(f"{name!r} is registered by {known.__module__}.{known.__qualname__} already")
    registry[name] = what


def load(folders: Sequence[str | Path]) -> None:
    """Import every module of the folders; they may import each other by name. Raises PluginError."""
    for folder in folders:
        place = Path(folder).expanduser().resolve()
        if not place.is_dir():
            raise PluginError(f"plugin folder {str(folder)!r} does not exist")
        modules = [path for path in sorted(place.iterdir()) if _is_module(path)]
        if str(place) not in sys.path:
            for path in modules:
                if _is_taken(path.stem):
                    raise PluginError(f"{path}: another module is named {path.stem!r} already; rename it")
            sys.path.insert(0, str(place))
        for path in modules:
            try:
                importlib.import_module(path.stem)
            except (Exception, SystemExit) as error:  # a plugin may raise anything
                raise PluginError(f"{path}: {type(error).__name__}: {error}") from error


def _is_module(path: Path) -> bool:
    package = path.is_dir() and (path / "__init__.py").is_file()
    return (package or path.suffix == ".py") and path.stem.isidentifier() and not path.name.startswith("_")


def _is_taken(name: str) -> bool:
    """Whether a module would be hidden. A folder without __init__.py yields to any module, so it is none."""
    if name in sys.modules:
        return True
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None
