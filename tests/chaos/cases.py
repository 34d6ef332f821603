"""What a chaos case is, and the table of them all: case, invariant, runs, violations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

QUICK_RUNS = 20

# What a case is played on. Those without an engine have the real explorer, and everything else, in seconds.
NO_ENGINE, REAL_ENGINE, WHOLE_RUN = "no engine", "real vLLM", "whole run"


@dataclass(frozen=True)
class Row:
    """One invariant of one case. `violations` as text; the table counts them."""

    case: str
    invariant: str
    runs: int
    violations: tuple[str, ...] = ()

    def cells(self) -> tuple[str, ...]:
        return self.case, self.invariant, str(self.runs), str(len(self.violations))


@dataclass(frozen=True)
class Chosen:
    """What the command line asks of a case. `say` shows progress."""

    runs: int
    kills: int
    seed: int
    quick: bool
    say: Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """`play` gives the rows, at least one. `runs` is how often it is played by default."""

    name: str
    about: str
    parts: str
    runs: int
    play: Callable[[Chosen], Sequence[Row]] = field(repr=False)


HEADER = ("case", "invariant", "runs", "violations")


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    lines = [HEADER, ("---",) * len(HEADER), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
