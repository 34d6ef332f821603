"""`trinity tinker` ends with a sentence before it starts a process."""

from pathlib import Path

import pytest

from trinity.reading.errors import RunError
from trinity.runtime.process import FileLock
from trinity.tinker.main import tinker

pytestmark = pytest.mark.core


def test_without_yaml_without_model_and_twice(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no YAML; give it as --config FILE"):
        tinker([], None)
    path = tmp_path / "tinker.yaml"
    path.write_text(f"model_path: {tmp_path}/none\ntenants: [a]\ncheckpoint_root_dir: {tmp_path}\n")
    with pytest.raises(RunError, match=r"model_path: .*none has no config.json"):
        tinker([str(path)], None)
    assert not (tmp_path / "tinker/tinker/keys").exists()
    lock = FileLock(tmp_path / "tinker/tinker/.lock")
    assert lock.acquire()
    with pytest.raises(RunError, match="is in use by process"):
        tinker(["name=tinker"], path)
    lock.release()
