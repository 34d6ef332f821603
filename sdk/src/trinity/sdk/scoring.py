"""Input and results of scoring functions. They are pure: bounded time on any text, no evaluation of code."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from trinity.api.numbers import real_number
from trinity.sdk.contract import Response, Score, ScoreRequest
from trinity.sdk.errors import InvalidInput, text_of
from trinity.sdk.wire import parsed

MAX_ITEMS = 4096
# Time of one Score call. The caller waits 60 s; then the whole group of the items fails.
BUDGET_SECONDS = 40.0
_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


@dataclass(frozen=True)
class ScoreItem:
    """A finished answer. `task` is the dataset row, `truth` its reference answer, `token_ids` the response's."""

    prompt: str
    response: str
    truth: str
    task: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False
    response_tokens: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class ScoreResult:
    """A finite reward and its parts by name."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupScorer:
    """Scores all items of a Score call, the answers to one task, together: one result for each, in order."""

    function: Callable[[list[ScoreItem], dict[str, Any]], Sequence[Any]]


Scorer = Callable[[ScoreItem, dict[str, Any]], Any] | GroupScorer


def results(scorer: Scorer, items: list[ScoreItem], args: dict[str, Any]) -> list[ScoreResult]:
    """Returns a result for each item. Raises the scorer's errors, and ValueError for missing or infinite results."""
    given = scorer.function(items, args) if isinstance(scorer, GroupScorer) else [scorer(item, args) for item in items]
    found = [as_result(value) for value in given]
    if len(found) != len(items):
        raise ValueError(f"the scorer gave {len(found)} results for {len(items)} answers")
    for result in found:
        if not math.isfinite(result.reward):
            raise ValueError(f"the scorer gave {result.reward}; rewards are finite")
    return found


def as_result(value: Any) -> ScoreResult:
    """Converts the return value of a scoring function.

    A number is the reward. A mapping's numbers sum to the reward, unless it has a `score`: then `score` is the reward,
    as in veRL, and other entries that are finite numbers are metrics. Raises InvalidInput for text, other types and an
    empty mapping.
    """
    if isinstance(value, ScoreResult):
        metrics = {str(name): real_number(part, str(name)) for name, part in value.metrics.items()}
        return ScoreResult(real_number(value.reward, "reward"), metrics)
    if not isinstance(value, Mapping) or not value:  # an empty mapping scored nothing
        return ScoreResult(real_number(value, "reward"))
    if "score" in value:
        noted = {str(name): number for name, part in value.items() if (number := _finite(part)) is not None}
        return ScoreResult(real_number(value["score"], "score"), noted)
    parts = {str(name): real_number(part, str(name)) for name, part in value.items()}
    return ScoreResult(sum(parts.values()), parts)


def _finite(value: Any) -> float | None:
    with contextlib.suppress(InvalidInput):
        number = real_number(value, "")
        return number if math.isfinite(number) else None
    return None


def seconds_left() -> float:
    """Returns the seconds left for the Score call, by which scorers must end; infinite outside of a call."""
    return max(_deadline.get() - time.monotonic(), 0.0)


class Scoring:
    """One Score call. Any number of threads score its items one by one. Its time begins at construction.

    `scores` are complete when all threads are done.

    Raises InvalidInput for a request that is wrong as a whole.
    """

    def __init__(self, scorer: Scorer, request: ScoreRequest) -> None:
        if len(request.items) > MAX_ITEMS:
            raise InvalidInput("items", f"has {len(request.items)} items, at most {MAX_ITEMS} in one call")
        self._scorer = scorer
        self._args = parsed(request.args_json, "args_json")
        each = list(enumerate(request.items))
        self._waiting = deque([each] if isinstance(scorer, GroupScorer) and each else [[one] for one in each])
        self.scores = [Score(error="not scored: the service shut down")] * len(request.items)
        self._deadline = time.monotonic() + BUDGET_SECONDS

    def work(self) -> None:
        """Scores items until none waits. Other threads may still be at their last item then."""
        token = _deadline.set(self._deadline)
        try:
            while self._waiting:
                try:
                    indices, items = zip(*self._waiting.popleft(), strict=True)
                except IndexError:  # another thread was faster
                    return
                for index, score in zip(indices, _score(self._scorer, items, deepcopy(self._args)), strict=True):
                    self.scores[index] = score
        finally:
            _deadline.reset(token)

    def stop(self) -> None:
        """Drops waiting items."""
        self._waiting.clear()


def _score(scorer: Scorer, items: Sequence[Response], args: dict[str, Any]) -> list[Score]:
    try:
        found = results(scorer, [_item(item) for item in items], args)
    except BaseException as error:  # in a thread: a bad item fails itself, never the service
        return [Score(error=f"{type(error).__name__}: {text_of(error)}")] * len(items)
    return [Score(result.reward, result.metrics) for result in found]


def _item(item: Response) -> ScoreItem:
    return ScoreItem(
        prompt=item.prompt,
        response=item.response,
        truth=item.truth,
        task=parsed(item.task_json, "items.task_json"),
        truncated=item.truncated,
        response_tokens=item.response_tokens,
        token_ids=tuple(item.response_token_ids),
    )
