"""Seeds of requests in a reproducible run."""

import asyncio

import pytest

from trinity.explorer.workflows import seeds
from trinity.explorer.workflows.base import gather_rollouts

pytestmark = pytest.mark.core


async def rollout(prompts: list[list[int]], pause: float) -> list[int]:
    found = []
    for prompt in prompts:
        await asyncio.sleep(pause)
        found.append(seeds.of_request(7, prompt))
    return found


def group(task: str, pauses: tuple[float, ...]) -> list[list[int]]:
    async def attempt() -> list[list[int]]:
        with seeds.attempt(task):
            return await gather_rollouts(rollout([[1, 2], [1, 2], [3]], pause) for pause in pauses)

    return asyncio.run(attempt())


def test_the_order_of_requests_changes_no_seed() -> None:
    assert group("sums/0/1", (0.0, 0.02, 0.01)) == group("sums/0/1", (0.02, 0.0, 0.0))


def test_requests_have_seeds_of_their_own() -> None:
    found = [seed for rollouts in (group("sums/0/1", (0.0, 0.0)), group("sums/0/2", (0.0, 0.0))) for one in rollouts
             for seed in one]  # fmt: skip
    assert len(set(found)) == len(found) == 12
    assert all(0 <= seed < 2**48 for seed in found)


def test_rollouts_in_rollouts_are_apart() -> None:
    async def attempt() -> list[list[list[int]]]:
        async def inner() -> list[list[int]]:
            return await gather_rollouts(rollout([[1]], 0.0) for _ in range(2))

        with seeds.attempt("sums/0/1"):
            return await gather_rollouts(inner() for _ in range(2))

    found = [seed for outer in asyncio.run(attempt()) for one in outer for seed in one]
    assert len(set(found)) == 4


def test_another_seed_of_the_run_is_another_seed() -> None:
    assert seeds.of_request(7, [1, 2]) != seeds.of_request(8, [1, 2])
