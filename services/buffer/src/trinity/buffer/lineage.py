"""How old experience is when weights were withdrawn or rejected on the way.

A version's number is its optimizer step, so between two versions lie as many steps as their numbers differ by. After a
rollback the trainer goes on from older weights with its step count: what the withdrawn steps had learnt is not in them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from trinity.weights.pointer import Live

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Lineage:
    """`withdrawn`: ranges (after, up to and including) of steps whose weights are withdrawn, apart and in order.

    `rejected`: steps that the LIVE version lacks because every newer one was rejected; nothing newer can be had.
    """

    withdrawn: Ranges = ()
    rejected: int = 0

    @classmethod
    def of(cls, live: Live) -> "Lineage":
        """As the pointer says it."""
        ancestors = cls(_joined(live.withdrawn))
        return cls(ancestors.withdrawn, ancestors.steps(live.step, live.gate_step) if live.step >= 0 else 0)

    def steps(self, version: int, until: int) -> int:
        """Steps that the weights of step `until` learnt and those of `version` did not; at least 0."""
        passed = sum(max(0, min(newest, until) - max(after, version)) for after, newest in self.withdrawn)
        return max(0, until - version - passed)


NOTHING_WITHDRAWN = Lineage()


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same steps, every one in one range alone."""
    found: list[tuple[int, int]] = []
    for after, newest in sorted(ranges):
        if found and after <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], newest)
        else:
            found.append((after, newest))
    return tuple(found)
