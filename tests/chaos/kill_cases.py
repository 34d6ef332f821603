"""Whole runs whose processes are killed with -9 at random moments, and what the auditor finds in what they left.

The same seed kills in the same phases after the same delays; what a process does at that moment is the machine's.
"""

import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from chaos.cases import WHOLE_RUN, Case, Chosen, Row
from chaos.killed_run import PHASES, STEPS_PER_KILL, ChaosRun, moment
from support.checks.audit import Findings
from trinity.reading.children import MAX_RESTARTS

ROOT = Path(__file__).parents[2]
ALONE = ("buffer", "explorer", "trainer", "nats")
PAIRS = ("buffer+nats", "trainer+buffer", "explorer+nats", "trainer+explorer")
KILLS_ALONE, KILLS_PAIR, KILLS_QUICK = 20, 5, 2
_FINISH_SECONDS = 600

INVARIANTS = {
    "lost": "I1: nothing acknowledged is lost",
    "doubled": "I2: no group is in the ledger twice",
    "ledger": "I3: step k is one batch",
    "counts": "I4: the counts add up",
}


@dataclass
class Played:
    """All runs of a case. `phases`: how many kills fell into which."""

    case: str
    runs: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    findings: list[Findings] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def rows(self) -> list[Row]:
        name = f"kill {self.case}, {self.phases.total()} times (whole run)"
        rows = [
            Row(name, text, self.runs, tuple(found for findings in self.findings for found in getattr(findings, what)))
            for what, text in INVARIANTS.items()
        ]
        return [*rows, Row(name, "the run continues and ends well", self.runs, tuple(self.failures))]


def play(case: str, chosen: Chosen) -> Sequence[Row]:
    """As many kills in each run as a supervisor takes for an accident."""
    kills = chosen.kills or (KILLS_QUICK if chosen.quick else KILLS_ALONE if case in ALONE else KILLS_PAIR)
    played, folder = Played(case), Path(tempfile.mkdtemp(prefix=f"trinity-chaos-{case}-"))
    while (left := kills - played.phases.total()) > 0 and not played.failures:
        played.runs += 1
        chance = random.Random(f"{chosen.seed}/{case}/{played.runs}")
        before = played.phases.total()
        _play_run(played, min(left, MAX_RESTARTS), chance, folder / f"{played.runs}", chosen)
        if played.phases.total() == before and not played.failures:
            played.failures.append(f"run {played.runs} ended before anything was killed")
    if not any(folder.iterdir()):
        folder.rmdir()
    phases = ", ".join(f"{played.phases[phase]} in {phase}" for phase in PHASES)
    groups = [sum(getattr(found, what) for found in played.findings) for what in ("stored", "acknowledged")]
    chosen.say(f"{case}: kills {phases}; groups stored {groups[0]}, of which acknowledged {groups[1]}")
    return played.rows()


def _play_run(played: Played, kills: int, chance: random.Random, folder: Path, chosen: Chosen) -> None:
    model, data = ROOT / "build/quickstart/model", ROOT / "build/quickstart/data"
    run = ChaosRun(ROOT, folder, model, data, STEPS_PER_KILL * (kills + 1), ahead=played.runs % 2)
    begin, victims = time.monotonic(), played.case.split("+")
    try:
        run.start()
        for phase in _phases(chance, kills):
            when = moment(chance, victims, phase)
            reached = run.strike(victims, when)
            if not reached:
                break
            played.phases[reached] += 1
            told = f"kill {played.phases.total()}, {reached} + {when.delay_seconds:.2f} s"
            chosen.say(f"{played.case} run {played.runs}: {told}")
        code = run.finish(_FINISH_SECONDS)
        if code != 0:
            raise AssertionError(f"exit code {code}: {run.tail()}")
        found = run.audited()
    except Exception as error:
        played.failures.append(f"run {played.runs} ({folder}): {type(error).__name__}: {error}")
        return
    finally:
        run.end()
    played.findings.append(found)
    again = len(run.record.lines) - len(run.record.said)
    chosen.say(
        f"{played.case} run {played.runs}: {found.stored} groups in {run.steps} steps, {again} trained again, "
        f"{len(found.differences)} differences, {time.monotonic() - begin:.0f} s"
    )
    if found.differences:
        chosen.say(f"what it left is in {folder}")
    else:
        shutil.rmtree(folder)


def _phases(chance: random.Random, kills: int) -> list[str]:
    """In random order, each as often as the others."""
    phases: list[str] = []
    while len(phases) < kills:
        phases += chance.sample(PHASES, len(PHASES))
    return phases[:kills]


CASES = [
    Case(
        f"kill-{name}", f"kill -9 of {name.replace('+', ' and ')} at random moments", WHOLE_RUN, 0, partial(play, name)
    )
    for name in (*ALONE, *PAIRS)
]
