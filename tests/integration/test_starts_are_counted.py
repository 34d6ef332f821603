"""The last lines of a test run count the engines and trainers that were started: in killed children of children too."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.plugin import starts
from support.programs.forked import ForkedModule

pytestmark = pytest.mark.core

ENGINE = "from vllm.v1.engine.core_client import MPClient; MPClient()"
TRAINER = "import deepspeed; deepspeed.initialize()"


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of this test alone: its starts are none of the run's."""
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setenv(starts.FILE, "")
    monkeypatch.setattr("sys.path", [*sys.path])
    starts.count_into(tmp_path / "starts")
    return tmp_path / "starts"


def child_of_a_child(start: str, **environment: str) -> None:
    """A start that fails, as it is given nothing, twice; then the process is killed."""
    twice = f"""
import os, signal
from trinity.runtime.torch_builds import hide_unusable_companions
hide_unusable_companions()
for _ in range(2):
    try:
        {start}
    except (TypeError, AssertionError):
        pass
os.kill(os.getpid(), signal.SIGKILL)
"""
    code = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {twice!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, timeout=120, text=True
    )
    assert done.returncode == -signal.SIGKILL % 256, done.stderr


@pytest.mark.parametrize(
    ("start", "what", "count"), [(ENGINE, "vLLM", 2), (TRAINER, "trainer", 1)], ids=["engines", "trainers"]
)
def test_a_start_in_a_child_that_is_killed_counts(
    start: str, what: str, count: int, noted: Path, request: pytest.FixtureRequest
) -> None:
    """Each engine of a process counts, and each process that trains, with the file of the test that started it."""
    child_of_a_child(start)
    file = str(request.path.relative_to(request.config.rootpath))
    assert starts.read(noted) == {(file, what): count}


def test_ranks_but_the_first_are_no_trainers_of_their_own(noted: Path) -> None:
    child_of_a_child(TRAINER, RANK="1")
    assert not starts.read(noted)


def test_a_trainer_in_a_forked_process_counts(noted: Path, tmp_path: Path) -> None:
    """The server that forks it has imported DeepSpeed long before."""
    process = ForkedModule("timeit", ["-n", "1", TRAINER], dict(os.environ), tmp_path / "out")
    process.wait(60)
    assert starts.read(noted).total() == 1, (tmp_path / "out").read_text()


def test_the_sum_comes_first_and_then_the_files_with_most_starts() -> None:
    count = starts.Count({("a.py", "vLLM"): 1, ("b.py", "trainer"): 2, ("b.py", "vLLM"): 1, ("", "trainer"): 1})
    first, *files = starts.report(count)
    assert first == "engine starts: 2 vLLM, 3 trainers"
    assert [line.split("trainers")[1].strip() for line in files] == ["b.py", "in no test", "a.py"]
