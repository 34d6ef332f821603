"""Plugins of a user: reward functions, workflows, operators, tools and environments, which the YAML names.

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

A tool is a function that the policy may call in tool_call_workflow; it runs in a separate thread of the explorer:

    @tool("weather", "The weather of a place.", {"place": {"type": "string"}})
    def weather(place):
        return f"It is sunny in {place}."

An environment is a class that derives from trinity.sdk.Environment; the environment service plays it as its own:

    @environment("guess")
    class Guess(Environment): ...
"""

import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from trinity.plugins import satellites
from trinity.plugins.arguments import (
    AggregationMode,
    Fraction,
    NonNegative,
    NonNegativeInt,
    PluginError,
    Positive,
    PositiveFraction,
    check_name,
)
from trinity.plugins.declarations import (
    REGISTRIES,
    advantage,
    algorithm,
    entropy_loss,
    kl_function,
    place_of,
    policy_loss,
    sample_strategy,
    selector,
)
from trinity.plugins.environments import environment_problem
from trinity.plugins.trust import changeable_by_others, writable_by_everyone

__all__ = [
    "AggregationMode",
    "Fraction",
    "NonNegative",
    "NonNegativeInt",
    "PluginError",
    "Positive",
    "PositiveFraction",
    "Tool",
    "advantage",
    "algorithm",
    "entropy_loss",
    "environment",
    "experience_operator",
    "failing_line",
    "group_reward_function",
    "kl_function",
    "load",
    "policy_loss",
    "reward_function",
    "sample_strategy",
    "selector",
    "tool",
    "workflow",
]

REWARD_FUNCTIONS: dict[str, Callable[..., Any]] = {}
GROUP_REWARD_FUNCTIONS: set[str] = set()  # which of them
WORKFLOWS: dict[str, type] = {}
ENVIRONMENTS: dict[str, Any] = {}
EXPERIENCE_OPERATORS: dict[str, Callable[..., Any]] = {}
RANDOM: set[Any] = set()  # functions that draw random numbers without the run's seed


@dataclass(frozen=True)
class Tool:
    """`schema` is in the form that chat templates take: {type: function, function: {name, description, parameters}}."""

    schema: dict[str, Any]
    function: Callable[..., Any]


TOOLS: dict[str, Tool] = {}
_TOOL_FUNCTIONS: dict[str, Callable[..., Any]] = {}

_Kind = TypeVar("_Kind", bound=type)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _decorator(
    registry: dict[str, Any], text: str, problem: Callable[[Any], str] = lambda _: ""
) -> Callable[..., Callable[[_Function], _Function]]:
    """Returns a decorator; `problem` says why it takes no such function, and is empty for others."""

    def named(name: str, *, random: bool = False) -> Callable[[_Function], _Function]:
        check_name(name)

        def register(function: _Function) -> _Function:
            _add(registry, name, function, problem)
            if random:
                RANDOM.add(function)
            return function

        return register

    named.__doc__ = f"{text} `random`: the same input may give other results, so reproducible runs refuse it."
    return named


def _call_problem(function: Any, first: str = "item") -> str:
    """Says why a function cannot be called with `first` and args; empty if it can."""
    try:
        inspect.signature(function).bind(None, None)
        takes = "is async" if inspect.iscoroutinefunction(function) else ""
    except TypeError:
        takes = f"takes {inspect.signature(function)}"
    return takes and f"{takes}; wrap it in a plain function of ({first}, args), see docs/plugins.md"


reward_function = _decorator(
    REWARD_FUNCTIONS, "Register a reward function for the YAML's default_reward_fn_type.", _call_problem
)


def group_reward_function(name: str) -> Callable[[_Function], _Function]:
    """Register a reward function of all answers to a task at once: (items, args), one result for each item."""
    check_name(name)

    def register(function: _Function) -> _Function:
        _add(REWARD_FUNCTIONS, name, function, lambda function: _call_problem(function, "items"))
        GROUP_REWARD_FUNCTIONS.add(name)
        return function

    return register


def _workflow_problem(kind: Any) -> str:
    """Says why a class is no workflow; empty if it is one."""
    if isinstance(kind, type) and hasattr(kind, "run") and "run" not in getattr(kind, "__abstractmethods__", ()):
        return ""
    return "is no class with run; derive it from a class of trinity.explorer.workflows, see docs/plugins.md"


workflow = _decorator(
    WORKFLOWS, "Register a workflow, a class, for the YAML's default_workflow_type.", _workflow_problem
)
experience_operator = _decorator(
    EXPERIENCE_OPERATORS, "Register an operator for the YAML's data_processor.experience_pipeline.operators."
)


def environment(name: str) -> Callable[[_Kind], _Kind]:
    """Register an environment, a class, for the `environment` of workflow_args. Its description gets this name."""
    check_name(name)

    def register(kind: _Kind) -> _Kind:
        if problem := environment_problem(kind):
            raise PluginError(f"{name!r} is registered for {kind!r}, which {problem}")
        if other := [known for known, one in ENVIRONMENTS.items() if one is kind and known != name]:
            raise PluginError(
                f"{name!r} is registered for {kind!r}, which is {other[0]!r} already; derive another class"
            )
        _add(ENVIRONMENTS, name, kind)
        kind.description = replace(kind.description, name=name)  # type: ignore[attr-defined]
        return kind

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


def _add(registry: dict[str, Any], name: str, what: Any, problem: Callable[[Any], str] = lambda _: "") -> None:
    """Registers one meaning for a name. Raises PluginError for a name of another place, and for a `problem`."""
    if not isinstance(name, str) or not name or not callable(what):
        raise PluginError(f"{name!r} is registered for {what!r}; a name is text, and what it names can be called")
    if found := problem(what):
        raise PluginError(f"{name!r} is registered for {what!r}, which {found}")
    known = registry.get(name)
    if known is not None and place_of(known) != place_of(what):
        raise PluginError(f"{name!r} is registered by {'.'.join(map(str, place_of(known)[:2]))} already")
    registry[name] = what


def load(folders: Sequence[str | Path]) -> list[str]:
    """Import every module of the folders; they may import each other by name.

    Returns sentences on who else may change the code, files that are not imported, and folders that register nothing.
    Raises PluginError, for a folder that every user may change too.
    """
    notices = []
    if find_names := satellites.find("plugin_names"):
        find_names()
    for folder in folders:
        place, files = _modules(folder)
        modules = [path for path in files if path.stem.isidentifier()]
        if problem := writable_by_everyone(place):
            raise PluginError(f"plugin folder {str(folder)!r}: {problem}")
        if others := changeable_by_others(place):
            notices.append(f"plugin folder {str(folder)!r}: {others}")
        for path in files:
            if path not in modules:
                better = re.sub(r"\W", "_", path.stem).lstrip("_0123456789") or "plugin"
                notices.append(f"{path} is not imported: rename it, for instance {better + path.suffix}")
        if str(place) not in sys.path:
            for path in modules:
                if _is_taken(path.stem):
                    raise PluginError(f"{path}: another module is named {path.stem!r} already; rename it")
            sys.path.insert(0, str(place))
        again, before = bool(modules) and all(path.stem in sys.modules for path in modules), _count_registered()
        for path in modules:
            try:
                with contextlib.redirect_stdout(sys.stderr):  # answers of commands may be JSON
                    importlib.import_module(path.stem)
            except (Exception, SystemExit) as error:  # a plugin may raise anything
                raise PluginError(f"{failing_line(error, place) or path}: {_described(error)}") from error
        if not again and _count_registered() == before:
            what = "registers nothing; put a decorator, such as @reward_function(name), before what the YAML names"
            notices.append(f"plugin folder {str(folder)!r} {what}")
    return notices


def _count_registered() -> int:
    own: list[dict[str, Any]] = [REWARD_FUNCTIONS, WORKFLOWS, ENVIRONMENTS, EXPERIENCE_OPERATORS, TOOLS]
    return sum(len(registry) for registry in [*own, *REGISTRIES.values()])


def failing_line(error: BaseException, folder: Path) -> str:
    """`file:line` of the last line of the folder's files that an exception passed; empty without one."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_relative_to(folder):
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(folder)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _described(error: BaseException) -> str:
    if isinstance(error, PluginError):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    if not isinstance(error, ImportError) or not (error.name or "").startswith("trinity."):
        return text
    if satellites.find("plugin_names") is None:
        return f"{text}; names of Trinity-RFT are in {satellites.missing('plugin_names')}"
    return f"{text}; docs/from_trinity.md has the names of Trinity-RFT that can be imported"


def _modules(folder: str | Path) -> tuple[Path, list[Path]]:
    """The folder, and the files and packages in it. Raises PluginError."""
    try:
        place = Path(folder).expanduser().resolve()
        return place, [path for path in sorted(place.iterdir()) if _is_plugin(path)]
    except FileNotFoundError:
        problem = "does not exist"
    except NotADirectoryError:
        problem = "is a file; give the folder that holds it"
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no user of that name; ValueError: a NUL
        problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    raise PluginError(f"plugin folder {str(folder)!r} {problem}")


def _is_plugin(path: Path) -> bool:
    package = path.is_dir() and (path / "__init__.py").is_file()
    return (package or path.suffix == ".py") and not path.name.startswith(("_", "."))


def _is_taken(name: str) -> bool:
    """Tells if a module would be hidden. A folder without __init__.py yields to any module, and is not counted."""
    if name in sys.modules:
        return True
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None
