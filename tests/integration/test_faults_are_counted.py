"""Each figure of benchmarks/faults is 0 for a system without a flaw, and is not for one that has it on purpose."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "benchmarks/faults"

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

TASKS, GROUP, ROWS = 2, 3, 40
PROMPTS = [(1, 2 + row, 99) for row in range(ROWS)]


@pytest.fixture(autouse=True, scope="module")
def path() -> Iterator[None]:
    sys.path.insert(0, str(FAULTS))
    yield
    sys.path.remove(str(FAULTS))


class Faulty:
    """The system of faulty_trainer.py under torchrun, which begins it again after a kill."""

    name, recovery = "faulty", ""

    def __init__(self, flaw: str) -> None:
        self._flaw = flaw

    def prepare(self, settings: object, folder: Path) -> None:
        pass

    def paths(self) -> Sequence[str]:
        return []

    def command(self, settings: object, folder: Path) -> Sequence[str]:
        script = ROOT / "tests/support/programs/faulty_trainer.py"
        values = {"flaw": self._flaw, "prompts": json.dumps(PROMPTS), "group": GROUP, "tasks": TASKS, "save-every": 4}
        arguments = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
        return [*torchrun, str(script), str(folder), *arguments]


@pytest.mark.parametrize(
    ("flaw", "case", "expected"),
    [
        ("none", "kill-trainer", {}),
        ("none", "grader-fails", {}),
        ("skips", "kill-trainer", {"rows_skipped": 4}),
        ("repeats", "kill-trainer", {"rows_twice": 4}),
        ("drops", "grader-fails", {"groups_partly": 3}),
        ("fakes", "grader-fails", {"ungraded": 3}),
        ("rewinds", "kill-trainer", {"unexplained": 1}),
    ],
)
def test_a_flaw_is_counted(flaw: str, case: str, expected: Mapping[str, int], tmp_path: Path) -> None:
    import audit
    import run
    from cases import CASES
    from systems.base import Settings

    settings = Settings(tmp_path, tmp_path, ROWS, TASKS, GROUP, tokens=6, save_every=4, seed=1)
    work = audit.Work(PROMPTS, GROUP, TASKS, frozenset({0}))
    chosen = next(known for known in CASES if known.name == case)
    result = run.play(Faulty(flaw), chosen, settings, work, tmp_path / "run", 60)
    assert result.end == "finished", result
    found = dict(result.figures.faults)
    if flaw == "rewinds":  # what came before is in no lineage any more
        found.pop("rows_skipped")
    assert found == expected
    if case == "kill-trainer":
        assert result.back_seconds is not None
        assert result.figures.steps_undone > 0
        assert result.figures.lost > 0


def test_the_command_prints_the_table_of_both_systems(tmp_path: Path) -> None:
    """TRL comes from the package index, into a folder that only its processes import from."""
    options = ["--cpu", "--cases", "kill-trainer", "--steps", "8", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(FAULTS / "run.py"), "--systems", "trinity", "trl", *options],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line][2:]
    assert [row[:3] for row in rows] == [
        [system, case, "finished"] for system in ("trinity", "trl") for case in ("none", "kill-trainer")
    ]
    for row in rows:  # skipped, twice, partly, ungraded
        assert row[3:7] == ["0"] * 4, row
