"""torchvision and its kin are out of sight where they were built for another torch than the one that is installed."""

import importlib.metadata
import importlib.util
import sys
import types

import pytest

from trinity.runtime.torch_builds import hide_unusable_companions

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("torch", "torchvision", "hidden"),
    [
        ("2.13.0+cpu", "0.28.0", True),
        ("2.13.0+cpu", "0.28.0+cpu", False),
        ("2.13.0", "0.28.0", False),
        ("2.13.0+cpu", None, False),
        (None, "0.28.0", False),
    ],
)
def test_only_builds_that_cannot_work_are_hidden(
    torch: str | None, torchvision: str | None, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"torch": torch, "torchvision": torchvision}

    def version(name: str) -> str:
        found = versions.get(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    del sys.modules["torchvision"]  # monkeypatch puts back what was there
    hide_unusable_companions()
    assert ("torchvision" in sys.modules) == hidden
    if hidden:
        assert importlib.util.find_spec("torchvision") is None
        with pytest.raises(ModuleNotFoundError):
            import torchvision
