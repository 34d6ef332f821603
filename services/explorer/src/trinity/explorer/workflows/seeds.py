"""Seeds of requests in a reproducible run: each follows from the task, the rollout and the prompt alone.

So neither the order of requests nor the explorer that makes them changes a response.
"""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np

Result = TypeVar("Result")

_BITS = 48  # vLLM adds the number of the response to it, within 63 bits


class _Attempt:
    """What was asked in one attempt at a task."""

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id
        self.asked: Counter[bytes] = Counter()


_attempt: ContextVar[_Attempt | None] = ContextVar("attempt", default=None)
_rollout: ContextVar[tuple[int, ...]] = ContextVar("rollout", default=())


@contextlib.contextmanager
def attempt(task_id: str) -> Iterator[None]:
    """The requests in this context belong to one attempt at a task."""
    token = _attempt.set(_Attempt(task_id))
    try:
        yield
    finally:
        _attempt.reset(token)


async def numbered(index: int, rollout: Coroutine[Any, Any, Result]) -> Result:
    """The rollout, whose requests are apart from those of its siblings. For an asyncio task of its own."""
    _rollout.set((*_rollout.get(), index))
    return await rollout


def place() -> str:
    """Which rollout of its group this is, as text: the numbers of `numbered` around it."""
    return ".".join(str(index) for index in _rollout.get())


def of_request(seed: int, prompt_token_ids: Sequence[int]) -> int:
    """The seed of the next request with this prompt in this rollout, from the run's seed. Below 2**48."""
    current = _attempt.get()
    prompt = np.asarray(prompt_token_ids, np.int64).tobytes()
    place = f"{seed}/{current.task_id if current else ''}/{_rollout.get()}/".encode() + prompt
    key = hashlib.blake2b(place).digest()
    before = 0
    if current is not None:
        before = current.asked[key]
        current.asked[key] += 1
    digest = hashlib.blake2b(key + before.to_bytes(8, "big"), digest_size=_BITS // 8).digest()
    return int.from_bytes(digest, "big")
