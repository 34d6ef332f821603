"""Companions of torch that were built for another one: torchaudio is out of sight, torchvision can be imported."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from trinity.runtime import torch_builds
from trinity.runtime.torch_builds import hide_unusable_companions

pytestmark = pytest.mark.core

CASES = [
    ("2.13.0+cpu", "0.28.0", True),
    ("2.13.0+cpu", "0.28.0+cpu", False),
    ("2.13.0", "0.28.0", False),
    ("2.13.0+cpu", None, False),
    (None, "0.28.0", False),
]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    found: dict[str, str | None] = {}

    def version(name: str) -> str:
        if found.get(name) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return str(found[name])

    monkeypatch.setattr(importlib.metadata, "version", version)
    return found


@pytest.mark.parametrize(("torch", "torchaudio", "hidden"), CASES)
def test_only_builds_that_cannot_work_are_hidden(
    torch: str | None, torchaudio: str | None, hidden: bool, versions: dict[str, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    versions |= {"torch": torch, "torchaudio": torchaudio}
    monkeypatch.setitem(sys.modules, "torchaudio", types.ModuleType("torchaudio"))
    del sys.modules["torchaudio"]  # monkeypatch puts back what was there
    hide_unusable_companions()
    assert ("torchaudio" in sys.modules) == hidden
    if hidden:
        assert importlib.util.find_spec("torchaudio") is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("torchaudio")


# A package that names operators while it is imported, as torchvision does; its own shared library cannot be loaded.
FAKE = """
import torch
for name in ("nms", "qnms"):
    torch.library.register_fake(f"torchvision::{name}", lambda *_: None)
VALUE = 3
"""


@pytest.mark.parametrize(("torch", "torchvision", "mended"), CASES)
def test_torchvision_of_another_build_is_imported_without_its_operators(
    torch: str | None, torchvision: str | None, mended: bool, versions: dict[str, str | None], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    versions |= {"torch": torch, "torchvision": torchvision}
    others = [place for place in sys.path if place != torch_builds._WITHOUT_OPERATORS]
    monkeypatch.setattr(sys, "path", others)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, others)]))
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text(FAKE)
    hide_unusable_companions()
    hide_unusable_companions()
    assert sys.path.count(torch_builds._WITHOUT_OPERATORS) == mended
    if torch is None:
        return
    grandchild = "import subprocess, sys, torchvision; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    look = "import torchvision as t; assert t.VALUE == 3"
    done = subprocess.run([sys.executable, "-c", grandchild, look], capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == mended
    if not mended:
        assert "operator torchvision::nms does not exist" in done.stderr
