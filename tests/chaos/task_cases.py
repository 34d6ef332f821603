"""Cases with tasks: a real buffer feeds the members and writes the ledger. See striking.py."""

import random
import time
from functools import partial

from chaos.striking import case
from chaos.versions.run import FOLDER, S3, check
from chaos.versions.tasks import GROUPS, TaskRun
from chaos.weight_cases import ALL
from trinity.weights.wire import ExplorerState

_AHEAD = 3


@case("SIGTERM in the middle of groups: exit code 0, no lease left behind, every task ends once",
      open=partial(TaskRun, steps=6, ahead=1, response=150))  # fmt: skip
def leave_in_a_group(run: TaskRun, chance: random.Random) -> None:
    run.open(*ALL)
    run.train_to(2)
    victim = chance.choice(ALL)
    run.until(lambda: run.members()[victim].state == ExplorerState.RUNNING, 20, f"{victim} works on a group")
    time.sleep(chance.uniform(0, 0.5))
    code = run.explorers.pop(victim).stop()
    check(code == 0, f"{victim} left with exit code {code}")
    check(victim not in run.members(), f"{victim} is still a member after it has left")
    run.train_to(run.steps)


@case("a rollback: no group with a withdrawn token is in a ledger entry that is written later",
      open=partial(TaskRun, steps=14, ahead=_AHEAD, response=30))  # fmt: skip
def rollback_with_fencing(run: TaskRun, chance: random.Random) -> None:
    run.open(*ALL)
    written = _train_until_groups_lie_ready(run, chance)
    newest = run.trained
    target = newest - chance.randint(1, 3)
    done = run.rollback(target)
    _go_on(run)
    withdrawn = set(done.withdrawn)
    check(withdrawn == set(range(target + 1, newest + 1)), f"a rollback to {target} has withdrawn {withdrawn}")
    run.until(lambda: run.stats().dropped.get("fenced", 0) > 0, 20, "the buffer has fenced something")
    run.until_serve(target)
    for name in (FOLDER, S3):
        versions = {span.version for span in run.generate(name, 20).spans}
        check(versions == {target}, f"{name} answers by {versions} after a rollback to {target}")
    run.train_to(run.steps)
    fenced = {
        sequence
        for sequence, group in run.stored().items()
        if any(span.version in withdrawn for e in group.experiences for span in e.version_spans)
    }
    check(fenced, "no group of a withdrawn version was stored: nothing was shown")
    for entry in run.ledger()[written:]:
        found = fenced & {group.log_sequence for group in entry.groups}
        check(not found, f"step {entry.step} has the fenced groups {sorted(found)}")


def _train_until_groups_lie_ready(run: TaskRun, chance: random.Random) -> int:
    """Until some by the newest version are stored and in no ledger entry; the steps that have one.

    They are too few for an entry, and the explorers stand still, so that they lie there until the rollback.
    """
    for step in range(4, run.steps - _AHEAD):
        run.train_to(step)
        all_fed = GROUPS * (step + 1 + _AHEAD)
        missing = chance.randrange(1, GROUPS)
        run.until(lambda: run.stats().stored >= all_fed - missing, 40, "groups lie ready")  # noqa: B023
        for explorer in run.explorers.values():
            explorer.hold()
        ledger = run.ledger()
        taken = {group.log_sequence for entry in ledger for group in entry.groups}
        lying = [group for sequence, group in run.stored().items() if sequence not in taken]
        versions = {span.version for group in lying for e in group.experiences for span in e.version_spans}
        if len(lying) < GROUPS and run.trained in versions:
            return len(ledger)
        _go_on(run)
    raise AssertionError("the ledger was always ahead of all that is stored: nothing can be fenced")


def _go_on(run: TaskRun) -> None:
    for explorer in run.explorers.values():
        explorer.go_on()
