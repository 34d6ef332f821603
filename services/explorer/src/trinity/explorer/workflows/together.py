"""The rollouts of a group, at the same time."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from trinity.explorer.types import EngineFailed

Result = TypeVar("Result")


async def gather_rollouts(rollouts: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The rollouts' results, in order. The first failure cancels the others and is raised unchanged.

    A group is stored whole or not at all: without its failed rollouts the baseline of the others would be biased.
    EngineFailed takes precedence over other failures.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(rollout) for rollout in rollouts]
    except BaseExceptionGroup as failures:
        found = list(_leaves(failures))
        raise next((error for error in found if isinstance(error, EngineFailed)), found[0]) from None
    return [task.result() for task in tasks]


def _leaves(group: BaseExceptionGroup[Any]) -> Iterable[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
