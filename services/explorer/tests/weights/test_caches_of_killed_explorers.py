"""Without TRINITY_EXPLORER_CACHE_DIR the cache is a temporary folder that is removed even after a kill."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trinity.explorer.weights.loader import cache_folder

pytestmark = pytest.mark.core

HOLDER = """
import sys, time
from trinity.explorer.weights.loader import cache_folder
with cache_folder(None, "x") as folder:
    (folder / "run/v1").mkdir(parents=True)
    (folder / "run/v1/part.safetensors").write_bytes(b"weights")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def hold() -> tuple["subprocess.Popen[str]", Path]:
    command = [sys.executable, "-c", HOLDER]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    return holder, Path(holder.stdout.readline().strip())


def test_the_folder_of_a_killed_explorer_is_removed_by_the_next_one_and_a_living_ones_is_not(parent: Path) -> None:
    (alive, kept), (killed, left) = hold(), hold()
    killed.kill()
    killed.wait(timeout=20)
    assert left.is_dir()
    with cache_folder(None, "x") as own:
        assert set(parent.iterdir()) == {kept, own}
        assert (kept / "run/v1/part.safetensors").read_bytes() == b"weights"
    alive.communicate(timeout=20)
    assert not list(parent.iterdir())


def test_a_folder_of_choice_stays(parent: Path) -> None:
    with cache_folder(parent / "chosen", "me") as folder:
        (folder / "v1").mkdir()
    with cache_folder(parent / "chosen", "me") as again:
        assert (again / "v1").is_dir()
