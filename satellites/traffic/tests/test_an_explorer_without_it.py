"""An explorer without trinity-traffic records nothing, and refuses a YAML that wants calls recorded."""

from types import SimpleNamespace
from typing import Any

import pytest

from trinity.explorer.build import ExplorerBuilder
from trinity.plugins import satellites
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core


def _calls(traffic: Any) -> Any:
    return ExplorerBuilder.calls(SimpleNamespace(_explorer=SimpleNamespace(traffic=traffic)), None)


def test_the_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(satellites, "find", lambda hook: None)
    assert _calls(None) is None
    with pytest.raises(InvalidInput, match=r"explorer\.traffic: needs trinity-traffic, which is not installed"):
        _calls(object())


def test_each_stage_of_a_run_opens_calls() -> None:
    traffic = satellites.find("traffic")
    first, second = (traffic.open_calls(None, None, "explorer", None) for _ in range(2))
    assert first == second
