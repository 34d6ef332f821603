"""The built-in reward functions as Trinity-RFT's classes: what they are called with, the environment service scores."""

import json
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from trinity.common.refusals import NotMapped
from trinity.common.rewards.reward_fn import RewardFn

# (name, args, response, prompt, truth) -> parts of the reward; set in the thread of a workflow.
Score = Callable[[str, dict[str, Any], str, str, str], dict[str, float]]
SCORE: ContextVar[Score | None] = ContextVar("score", default=None)
_WITHOUT_EFFECT = ("response_token", "return_dict", "task", "workflow")  # of a call: the workflow knows the tokens
_DEFAULTS = {"format_score_coef": 0.1, "answer_parser": None}  # other values are not mapped


class BuiltInReward(RewardFn):
    """The function `name`, with arguments of the constructor and of the call over each other.

    With a list of right answers as `truth`, the best score counts.
    """

    name = ""

    def __init__(self, **args: Any) -> None:
        self._args = args

    def __call__(self, response: str, prompt: str | None = None, truth: Any = None, **args: Any) -> dict[str, float]:
        score = SCORE.get()
        if score is None:
            raise NotMapped(f"{type(self).__name__} scores only in workflows", "reward-functions")
        given = {name: value for name, value in {**self._args, **args}.items() if name not in _WITHOUT_EFFECT}
        for name, default in _DEFAULTS.items():
            if given.pop(name, default) not in (None, default):
                raise NotMapped(f"{type(self).__name__} takes no other {name} than its own", "reward-functions")
        try:
            json.dumps(given)
        except TypeError as error:
            raise NotMapped(f"{type(self).__name__}: an argument is no JSON: {error}", "reward-functions") from None
        truths = truth if isinstance(truth, list) and truth else ["" if truth is None else truth]
        found = [score(self.name, given, response, prompt or "", str(one)) for one in truths]
        return max(found, key=lambda parts: sum(parts.values()))
