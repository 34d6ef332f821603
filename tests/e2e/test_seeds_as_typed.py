"""What Trinity-RFT's guides type, typed from an empty folder: see seeds_as_typed.sh."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(2400)]


def test_every_command_and_yaml_of_the_guides_answers_as_expected(repository: Path, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", str(repository / "tests/e2e/seeds_as_typed.sh"), str(tmp_path / "empty")]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=2300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 unexpected" in done.stdout
