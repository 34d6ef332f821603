"""The committed stubs equal those made from the .proto files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_generating_again_changes_nothing(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(repository / "proto/generate.py"), "--check"], capture_output=True, text=True, timeout=280
    )
    if done.returncode and "No matching distribution" in done.stdout + done.stderr and not os.environ.get("CI"):
        pytest.skip("the package index is out of reach")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.core
@pytest.mark.parametrize(
    "script",
    [
        "docs/generate.py",
        "docs/declarations.py",
        "docs/generate_metrics.py",
        "docs/generate_models.py",
        "examples/generate.py",
    ],
)
def test_what_follows_from_schema_and_declarations_is_written(repository: Path, script: str) -> None:
    done = subprocess.run(
        [sys.executable, script, "--check"], cwd=repository, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tables_of_algorithms_are_what_is_measured(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate_algorithms.py", "--check"],
        cwd=repository, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
