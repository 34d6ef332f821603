"""The committed stubs are what the .proto files give."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.core


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_generating_again_changes_nothing(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(repository / "proto/generate.py"), "--check"], capture_output=True, text=True, timeout=280
    )
    if done.returncode and "No matching distribution" in done.stdout + done.stderr and not os.environ.get("CI"):
        pytest.skip("the package index is out of reach")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_page_is_what_the_schema_says(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=repository, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tables_of_algorithms_are_what_is_measured(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate_algorithms.py", "--check"],
        cwd=repository, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
