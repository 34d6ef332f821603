"""Errors of steps that cannot be trained: a value is not finite, or memory runs out."""

from collections.abc import Sequence

from trinity.runtime.errors import TrinityError


class BadStep(TrinityError):
    """This step's batch cannot be trained. `groups`: indices, in the batch, of those that cause it.

    `updates`: number of the step's earlier updates, which stay. `among`: the groups of the failed update.
    """

    for_good = True  # the ledger has the same batch for the next attempt
    updates = 0
    among: Sequence[int] = ()
    hint = ""

    def __init__(self, problem: str, step: int, groups: Sequence[int] = ()) -> None:
        self.problem = problem
        self.step = step
        self.groups = sorted(set(groups))
        super().__init__(problem)

    def __str__(self) -> str:
        named = ""
        if self.groups:
            named = f"; groups {_listed(self.groups)} of the batch"
        elif self.among:
            named = f"; no single group is the cause, the update was of groups {_listed(self.among)} of the batch"
        return f"step {self.step}: {self.problem}{named}{self.hint}"


def _listed(groups: Sequence[int], most: int = 20) -> str:
    rest = f" and {len(groups) - most} more" if len(groups) > most else ""
    return ", ".join(map(str, groups[:most])) + rest


class NotFinite(BadStep):
    """A reward, an advantage, a loss or the norm of the gradient is NaN or infinite. No weight was changed by it."""

    def __init__(self, what: str, step: int, groups: Sequence[int] = ()) -> None:
        super().__init__(f"the {what} is not finite", step, groups)


class Undecodable(BadStep):
    """A group of the batch is not what the buffer should have let into the log."""


class OutOfMemory(BadStep):
    """Memory was not enough for a micro-batch, nor for half of one."""


class OutOfMemoryAlone(TrinityError):
    """As OutOfMemory, on a rank that others wait for in a collective: the step can neither be undone nor skipped."""

    for_good = True

    def __init__(self, error: OutOfMemory) -> None:
        super().__init__(f"{error}; the other ranks wait for this one, so the trainer ends")
