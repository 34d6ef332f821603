"""A spare loads first, and goes on in the environment of its order; it ends with its parent or by its end."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trinity.runtime.process import as_parent
from trinity.runtime.spares import Spare

pytestmark = pytest.mark.core

PROGRAM = """
import os, sys
from pathlib import Path
from trinity.runtime import spares
spares.wait(lambda: (Path(sys.argv[1]) / "loaded").write_text(os.environ["PLACE"]))
print(os.environ["PLACE"], os.environ["KEPT"], os.environ.get("TRINITY_SPARE"), repr(sys.stdin.read()))
"""
PARENT = f"""
import os, sys
from trinity.runtime.process import as_parent
from trinity.runtime.spares import Spare
spare = Spare([sys.executable, "-c", {PROGRAM!r}, sys.argv[1]], {{**os.environ, **as_parent(), "PLACE": "1"}})
print(spare._process.pid, flush=True)
sys.stdin.read()
"""


def until_loaded(folder: Path) -> str:
    while not (folder / "loaded").exists() or not (text := (folder / "loaded").read_text()):
        pass
    return text


@pytest.mark.timeout(60)
def test_it_loads_at_once_and_runs_in_the_environment_of_its_order(tmp_path: Path) -> None:
    own = {**os.environ, **as_parent(), "PLACE": "none", "KEPT": "kept"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    spare = Spare(command, own, stdout=subprocess.PIPE)
    assert until_loaded(tmp_path) == "none"
    process = spare.begin({**own, "PLACE": "Ünder way\nof " + "x" * 100_000})
    assert process is not None and process.stdout is not None
    said = process.stdout.read().decode()
    assert process.wait() == 0
    assert said.startswith("Ünder way\nof xxx") and said.endswith("x kept None ''\n")
    done = subprocess.run(command, env={**own, "PLACE": "own"}, input=b"read", capture_output=True)
    assert done.stdout == b"own kept None 'read'\n", "it is no spare, and does not wait"


@pytest.mark.timeout(60)
def test_one_that_has_died_is_none(tmp_path: Path) -> None:
    spare = Spare([sys.executable, "-c", "raise SystemExit(1)"], {**os.environ, **as_parent()})
    spare._process.wait()
    assert spare.begin({**os.environ, "PLACE": "x" * 100_000}) is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("killed", [True, False])
def test_it_ends_with_its_parent(killed: bool, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdin is not None and parent.stdout is not None
    spare = psutil.Process(int(parent.stdout.readline()))
    until_loaded(tmp_path)
    if killed:
        parent.kill()
    parent.stdin.close()
    parent.wait()
    psutil.wait_procs([spare], 30)
    assert not spare.is_running()
