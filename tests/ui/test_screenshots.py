"""The pictures of docs/ui.md: a script makes them all, small, and without a folder of the machine."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytestmark = pytest.mark.extended


def test_the_script_makes_every_picture_of_the_docs(repository: Path, browser: Any, tmp_path: Path) -> None:
    subprocess.run([sys.executable, repository / "docs/screenshots.py", tmp_path], check=True, timeout=200)
    made = {path.name: path for path in tmp_path.iterdir()}
    named = re.findall(r"images/(ui_\w+\.png)", (repository / "docs/ui.md").read_text())
    assert sorted(named) == sorted(made) == sorted(path.name for path in (repository / "docs/images").glob("ui_*"))
    assert len(made) == 7
    assert "docs/images/ui_run.png" in (repository / "README.md").read_text()
    for path in made.values():
        assert path.stat().st_size < 40_000, path
        with Image.open(path) as image:
            assert image.width == 1000 and image.height > 300, path
            assert len(image.convert("RGB").getcolors() or []) > 8, f"{path} is nearly empty"
