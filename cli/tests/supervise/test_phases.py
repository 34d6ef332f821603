"""Long commands say what they do: on a terminal one line with counting seconds, without one a line at the beginning."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs.terminal import Terminal

pytestmark = pytest.mark.core

CODE = """
import sys, time
from trinity.cli.supervise.phases import phase
with phase("reads a file of a name " + "that is long " * 20):
    time.sleep(2.2)
print("a result")
try:
    with phase("asks", sys.stderr):
        raise RuntimeError
except RuntimeError:
    print("ended")
"""


@pytest.mark.parametrize("columns", [80, 160])
def test_a_terminal_has_one_line_for_each_phase(tmp_path: Path, columns: int) -> None:
    with Terminal([sys.executable, "-c", CODE], tmp_path, columns) as terminal:
        terminal.expect(r" \.\.\. 0 s", 30)
        terminal.expect(r" \.\.\. 1 s", 30)
        assert terminal.ended(30) == 0
        screen = terminal.screen()
    first, *others = [line for line in screen.lines if line]
    assert re.fullmatch(r"reads a file of a name that is long .*\.\.\.: [23] s", first) and screen.wrapped == 0
    assert others == ["a result", "asks: 0 s", "ended"]


def test_a_pipe_has_a_line_for_each_phase_on_the_given_output() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert [line.split(" ")[0] for line in done.stdout.splitlines()] == ["reads", "a", "ended"]
    assert done.stderr == "asks ...\n"
    assert done.stdout.splitlines()[0].endswith(" ...") and len(done.stdout.splitlines()[0]) < 160
