"""The version is that of what is installed: all of Trinity, or a part."""

import importlib.metadata

import pytest

from trinity.runtime.version import installed_version

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"trinity": "0.2.0"}, "0.2.0"),
        ({"trinity-sync": "0.3.0"}, "0.3.0"),
        ({"trinity": "0.2.1", "trinity-sync": "0.2.0"}, "0.2.1"),
        ({}, "unknown: neither trinity nor its parts are installed"),
    ],
)
def test_all_of_trinity_comes_first(installed: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert installed_version("trinity-sync") == said


def test_other_packages_have_their_own() -> None:
    assert installed_version("pydantic") == importlib.metadata.version("pydantic") != installed_version("trinity-sync")
    assert installed_version("no-such-package") == "unknown: it is not installed"
