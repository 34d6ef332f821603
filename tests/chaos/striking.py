"""What the cases of weights and members share: how they are told of, played, and how a moment is struck.

A case does to the run what its name says, at moments that `chance` gives. It raises Violated where something takes too
long or is seen to be wrong; what was given and served meanwhile is judged at the end, by the run's `finish`.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from chaos.versions.run import WeightsRun
from chaos.versions.world import TENSORS, World


@dataclass(frozen=True)
class WeightCase:
    """`open` gives a run by its name; `play` strikes it. `at_once` runs at a time, where a case mostly waits. With
    `cluster` NATS is three servers."""

    name: str
    invariant: str
    play: Callable[[Any, random.Random], None]
    open: Callable[[World, str], WeightsRun] = WeightsRun
    at_once: int = 1
    cluster: bool = False


CASES: dict[str, WeightCase] = {}


def case(invariant: str, **options: Any) -> Callable[[Any], Any]:
    def named(play: Any) -> Any:
        name = play.__name__.replace("_", "-")
        CASES[name] = WeightCase(name, invariant, play, **options)
        return play

    return named


def play(chosen: WeightCase, world: World, run_name: str, seed: str) -> list[str]:
    """One run of a case; returns its violations as text."""
    run = chosen.open(world, run_name)
    try:
        chosen.play(run, random.Random(seed))
        return run.finish()
    except Exception as error:  # Violated, or a part that did not do what it has to
        return [f"{type(error).__name__}: {error}"]
    finally:
        run.end()


def in_a_broadcast(chance: random.Random, work: Callable[[], object]) -> Callable[[int], None]:
    """For publish: between two tensors of the broadcast."""
    chosen = chance.randrange(TENSORS - 1)

    def after(index: int) -> None:
        if index == chosen:
            work()

    return after


@contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Beside the body; what it raises is raised at the end."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(60)
    if failed:
        raise failed[0]
