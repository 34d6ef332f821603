"""Seeds of requests in a reproducible run, derived only from the task, the rollout and the prompt.

So a response depends neither on the order of requests nor on the explorer that makes them.
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
    """The number of requests with each prompt in one attempt at a task."""

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id
        self.requests: Counter[bytes] = Counter()


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
    """Run a rollout with seeds that differ from its siblings'. Call it in a separate asyncio task for each."""
    _rollout.set((*_rollout.get(), index))
    return await rollout


def place() -> str:
    """The rollout's place in its group, as text: the indices of the enclosing `numbered` calls."""
    return ".".join(str(index) for index in _rollout.get())


def of_request(seed: int, prompt_token_ids: Sequence[int]) -> int:
    """The seed of the rollout's next request with this prompt, derived from the run's seed. Below 2**48."""
    current = _attempt.get()
    prompt = np.asarray(prompt_token_ids, np.int64).tobytes()
    place = f"{seed}/{current.task_id if current else ''}/{_rollout.get()}/".encode() + prompt
    key = hashlib.blake2b(place).digest()
    before = 0
    if current is not None:
        before = current.requests[key]
        current.requests[key] += 1
    digest = hashlib.blake2b(key + before.to_bytes(8, "big"), digest_size=_BITS // 8).digest()
    return int.from_bytes(digest, "big")
