"""Kill every process at random moments, many times, and count what was lost. `make chaos`, or

    python tests/chaos/run_chaos.py [--case NAME ...] [--kills N] [--seed S]

Prints a table, a line for each case, and every difference found; exits with 1 if there is one. The same seed kills in
the same phases after the same delays; what a process does at that moment is the machine's.
"""

import argparse
import logging
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.audit import Findings  # noqa: E402
from support.chaos import PHASES, STEPS_PER_KILL, ChaosRun, moment  # noqa: E402
from trinity.cli.children import MAX_RESTARTS  # noqa: E402

ALONE = ("buffer", "explorer", "trainer", "nats")
PAIRS = ("buffer+nats", "trainer+buffer", "explorer+nats", "trainer+explorer")
KILLS_ALONE, KILLS_PAIR = 20, 5
_FINISH_SECONDS = 600


@dataclass
class Row:
    """One case. `phases`: how many kills fell into which."""

    case: str
    runs: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    findings: list[Findings] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def differences(self) -> list[str]:
        return [*self.failures, *(text for found in self.findings for text in found.differences)]

    def cells(self) -> list[str]:
        def total(what: str) -> int:
            return sum(len(getattr(found, what)) for found in self.findings)

        phases = " ".join(str(self.phases[phase]) for phase in PHASES)
        groups = [sum(getattr(found, what) for found in self.findings) for what in ("stored", "acknowledged")]
        counted = [total(what) for what in ("lost", "doubled", "ledger", "counts")]
        return [self.case, *map(str, (self.phases.total(), phases, self.runs, *groups, *counted, len(self.failures)))]


HEADER = [
    "case",
    "kills",
    "(" + ", ".join(PHASES) + ")",
    "runs",
    "groups stored",
    "acknowledged",
    "lost",
    "doubled",
    "ledger differences",
    "wrong counts",
    "runs that did not end well",
]


def play(case: str, kills: int, seed: int, folder: Path) -> Row:
    """All runs of a case: as many kills in each as a supervisor takes for an accident."""
    row, begin = Row(case), time.monotonic()
    victims = case.split("+")
    while (left := kills - row.phases.total()) > 0 and not row.failures:
        row.runs += 1
        rng = random.Random(f"{seed}/{case}/{row.runs}")
        before = row.phases.total()
        _play_run(row, victims, min(left, MAX_RESTARTS), rng, folder / f"{case}-{row.runs}")
        if row.phases.total() == before and not row.failures:
            row.failures.append(f"run {row.runs} ended before anything was killed")
    row.seconds = time.monotonic() - begin
    return row


def _play_run(row: Row, victims: Sequence[str], kills: int, rng: random.Random, folder: Path) -> None:
    model, data = ROOT / "build/quickstart/model", ROOT / "build/quickstart/data"
    run = ChaosRun(ROOT, folder, model, data, STEPS_PER_KILL * (kills + 1), ahead=row.runs % 2)
    begin = time.monotonic()
    try:
        run.start()
        for phase in _phases(rng, kills):
            when = moment(rng, victims, phase)
            reached = run.strike(victims, when)
            if not reached:
                break
            row.phases[reached] += 1
            _say(f"{row.case} run {row.runs}: kill {row.phases.total()}, {reached} + {when.delay_seconds:.2f} s")
        code = run.finish(_FINISH_SECONDS)
        if code != 0:
            raise AssertionError(f"exit code {code}: {run.tail()}")
        found = run.audited()
    except Exception as error:
        row.failures.append(f"run {row.runs} ({folder}): {type(error).__name__}: {error}")
        _say(row.failures[-1])
        return
    finally:
        run.end()
    row.findings.append(found)
    again = len(run.record.lines) - len(run.record.said)
    _say(
        f"{row.case} run {row.runs}: {found.stored} groups in {run.steps} steps, {again} trained again, "
        f"{len(found.differences)} differences, {time.monotonic() - begin:.0f} s"
    )
    for text in found.differences:
        _say(f"  {text}")
    if not found.differences:
        shutil.rmtree(folder)


def _phases(rng: random.Random, kills: int) -> list[str]:
    """In random order, each as often as the others."""
    phases: list[str] = []
    while len(phases) < kills:
        phases += rng.sample(PHASES, len(PHASES))
    return phases[:kills]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    lines = [HEADER, ["---"] * len(HEADER), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=[*ALONE, *PAIRS], default=[*ALONE, *PAIRS], metavar="NAME")
    parser.add_argument("--kills", type=int, help=f"in each case; else {KILLS_ALONE}, and {KILLS_PAIR} of a pair")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # with everything it started
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    folder = Path(tempfile.mkdtemp(prefix="trinity-chaos-"))
    rows = []
    for case in args.case:
        rows.append(play(case, args.kills or (KILLS_ALONE if case in ALONE else KILLS_PAIR), args.seed, folder))
        _say(f"{case}: {rows[-1].seconds:.0f} s")
    print(table(rows))
    differences = [f"{row.case}: {text}" for row in rows for text in row.differences]
    for text in differences:
        print(text)
    if differences:
        print(f"what the runs left is in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
