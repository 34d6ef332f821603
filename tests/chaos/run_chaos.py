"""Strike at random moments, many times, and count what does not hold. `make chaos`, or

    python tests/chaos/run_chaos.py [--case NAME ...] [--runs N] [--kills N] [--seed S] [--quick] [--list]

Prints one table, a line for each invariant of each case, then every violation as text; exits with 1 if there is one.
"""

import argparse
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos import kill_cases, machine_cases, member_cases, service_cases, short_cases
from chaos.cases import Case, Chosen, Row, table

CASES = [
    *member_cases.CASES,
    *kill_cases.CASES,
    *short_cases.CASES,
    *service_cases.CASES,
    *machine_cases.CASES,
]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def play(case: Case, chosen: Chosen) -> Sequence[Row]:
    begin = time.monotonic()
    say(f"{case.name} ({case.parts})")
    try:
        rows = case.play(chosen)
    except Exception as error:  # the other cases are worth their while all the same
        logging.getLogger(__name__).exception(case.name)
        rows = [Row(case.name, case.about, chosen.runs, (f"{type(error).__name__}: {error}",))]
    say(f"{case.name}: {time.monotonic() - begin:.0f} s")
    return rows


def parse(arguments: Sequence[str] | None, cases: Sequence[Case]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=[case.name for case in cases], metavar="NAME", help="else all")
    parser.add_argument("--runs", type=int, help="of each case; else as --list says")
    parser.add_argument("--kills", type=int, default=0, help="in each case of a whole run; else 20, and 5 of a pair")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="once each, two kills of a process, stopped for 12 s")
    parser.add_argument("--list", action="store_true", help="the cases, what they are played on, and how often")
    given = parser.parse_args(arguments)
    for name in ("runs", "kills"):
        if (getattr(given, name) or 0) < 0 or (getattr(given, name) == 0 and name == "runs"):
            parser.error(f"--{name} is {getattr(given, name)}, must be at least 1")
    return given


def main(arguments: Sequence[str] | None = None, cases: Sequence[Case] = CASES) -> int:
    given = parse(arguments, cases)
    if given.list:
        for case in cases:
            print(f"{case.name:26}{case.parts:12}{f'{case.runs} runs' if case.runs else 'by kills':10}{case.about}")
        return 0
    rows: list[Row] = []
    for case in cases:
        if given.case is None or case.name in given.case:
            runs = 1 if given.quick else given.runs or case.runs
            rows += play(case, Chosen(runs, given.kills, given.seed, given.quick, say))
    print(table(rows))
    violations = [f"{row.case}: {text}" for row in rows for text in row.violations]
    print("\n".join(violations))
    return 1 if violations else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # with everything it started
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    sys.exit(main())
