"""A trainer on two or three machines: ranks and machines are killed, stopped and cut off, in network namespaces."""

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chaos.cases import WHOLE_RUN, Case, Chosen, Row
from chaos.service_cases import MADE, ROOT
from support.programs.trainer_site import (
    ACCIDENTS,
    STEPS,
    Site,
    alone,
    assert_groups_once,
    assert_undisturbed,
    long_sft,
    with_accident,
    with_explorer,
)
from support.servers import containers
from support.servers.machines import Machines

GOES_ON = "two machines train again after an accident, and the run ends with exit code 0"
SAME = f"each of {STEPS} steps is trained, and weights are within 1e-5 of an undisturbed run's"
ONCE = "a machine of three is killed: fed = stored, and each group is trained once"
_STRIKES = (2, 12)  # after one of these steps


def _made() -> tuple[Path, Path]:
    made = Path(os.environ.get(MADE) or ROOT / "build/quickstart")
    return made / "model", made / "data"


def _play_site(case: str, number: int, machines: int, chosen: Chosen, play: Callable[[Site], Any]) -> str:
    """Plays one run; returns what fails as text, and leaves its folder if something does."""
    folder, begin = Path(tempfile.mkdtemp(prefix=f"trinity-chaos-{case}-")), time.monotonic()
    problem = ""
    with Machines(machines) as made:
        try:
            chosen.say(str(play(Site(made, folder, folder / "run.yaml")) or ""))
        except Exception as error:
            problem = f"run {number}, in {folder}: {type(error).__name__}: {error}"
    chosen.say(f"{case} run {number}: {problem or 'well'}, {time.monotonic() - begin:.0f} s")
    if not problem:
        shutil.rmtree(folder)
    return problem


def play_accidents(chosen: Chosen) -> Sequence[Row]:
    if reason := containers.missing():
        return [Row("trainer-machines", f"skipped: {reason}", 0)]
    rng, (model, data) = random.Random(f"{chosen.seed}/machines"), _made()
    found: dict[str, list[str]] = {GOES_ON: [], SAME: []}
    with tempfile.TemporaryDirectory(prefix="trinity-chaos-alone-") as folder:
        undisturbed = alone(Path(folder), long_sft(model, data, {}), STEPS)
    first = rng.randrange(len(ACCIDENTS))
    for number in range(1, chosen.runs + 1):
        accident = ACCIDENTS[(first + number - 1) % len(ACCIDENTS)]
        at_step, invariant = rng.randint(*_STRIKES), GOES_ON

        def play(site: Site) -> str:
            nonlocal invariant
            cost = with_accident(accident, site, model, data, at_step)  # noqa: B023
            invariant = SAME
            assert_undisturbed(site, undisturbed)
            return cost

        chosen.say(f"{accident.__name__} after step {at_step}")
        if problem := _play_site("trainer-machines", number, 2, chosen, play):
            found[invariant].append(f"{accident.__name__} after step {at_step}: {problem}")
    return [Row("trainer-machines", text, chosen.runs, tuple(problems)) for text, problems in found.items()]


def play_groups(chosen: Chosen) -> Sequence[Row]:
    if reason := containers.missing():
        return [Row("trainer-machines-groups", f"skipped: {reason}", 0)]

    def play(site: Site) -> None:
        with_explorer(site, *_made())
        assert_groups_once(site)

    runs = range(1, chosen.runs + 1)
    problems = [_play_site("trainer-machines-groups", number, 3, chosen, play) for number in runs]
    return [Row("trainer-machines-groups", ONCE, chosen.runs, tuple(filter(None, problems)))]


CASES = [
    Case("trainer-machines", "ranks and machines of the trainer are lost", WHOLE_RUN, len(ACCIDENTS), play_accidents),
    Case("trainer-machines-groups", "a machine of the trainer is lost, with explorers", WHOLE_RUN, 2, play_groups),
]
