"""Executes the commands of a queue; those of a tenant that has used less go between the parts of another one's pass."""

from collections.abc import Iterator

from trinity.tinker.commands.log import Command, Result
from trinity.tinker.executor.executor import Executor
from trinity.tinker.executor.queue import FairQueue

Executed = list[tuple[Command, Result | None]]


def turn(executor: Executor, queue: FairQueue) -> Iterator[Executed]:
    """Executes the next commands. Yields often: an empty list after a part of a pass, else the executed commands.

    The caller may add commands to the queue before it asks for the next ones.
    """
    several = queue.take()
    leading, charged = several[0].tenant, 0.0
    work = executor.work(several)
    while True:
        begin = executor.clock()
        try:
            next(work)
        except StopIteration as ended:
            results: list[Result | None] = ended.value
            break
        seconds = executor.clock() - begin
        charged += seconds
        queue.charge(leading, seconds)
        yield []
        while queue.is_behind(leading):
            yield from turn(executor, queue)
    queue.charge(leading, -charged)
    for command, result in zip(several, results, strict=True):
        queue.charge(command.tenant, 0.0 if result is None else result.seconds)
    queue.end(several)
    yield list(zip(several, results, strict=True))
