"""Reward functions as classes: made with reward_fn_args, called with what they name; they return parts."""

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from trinity import plugins
from trinity.api.numbers import real_number
from trinity.common.registry import Registry
from trinity.config.names import REWARD_FUNCTIONS as BUILT_IN


class RewardFn(ABC):
    """Called with keyword arguments: response, prompt, truth; returns the parts of the reward by name."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, float]: ...


def _scorer(kind: type[RewardFn]) -> Callable[[Any, dict[str, Any]], Any]:
    """The class as a reward function of trinity.plugins; one instance for each set of arguments."""
    made: dict[str, RewardFn] = {}

    def score(item: Any, args: dict[str, Any]) -> Any:
        key = json.dumps(args, sort_keys=True, default=str)
        if key not in made:
            made[key] = kind(**args)
        parts = {name: real_number(part, name) for name, part in made[key](**arguments_of(made[key], item)).items()}
        # Trinity-RFT adds all parts up; elsewhere a part called `score` would be the reward.
        return parts if "score" not in parts else {**parts, "score": sum(parts.values())}

    score.__module__, score.__qualname__ = kind.__module__, kind.__qualname__
    return score


def arguments_of(function: RewardFn, item: Any) -> dict[str, Any]:
    """Returns the fields of an item that the function takes as arguments."""
    given = {"response": item.response, "prompt": item.prompt, "truth": item.truth, "task": item.task}
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return given
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in given.items() if name in names}


def _add(name: str, kind: Any) -> None:
    if not (isinstance(kind, type) and issubclass(kind, RewardFn)):
        raise plugins.PluginError(
            f"{name!r} is registered for {kind!r}; derive it from trinity.common.rewards.RewardFn"
        )
    plugins.reward_function(name)(_scorer(kind))


REWARD_FUNCTIONS = Registry("REWARD_FUNCTIONS", _add, lambda: BUILT_IN)
