"""What vLLM's child processes are told while an engine starts, and that nothing of it stays."""

import os

import pytest

from trinity.explorer.engine.start import _environment
from trinity.explorer.types import EngineOptions

pytestmark = pytest.mark.core

DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"  # torch's watch over one group would end the engine for another's errors


def test_torch_does_not_end_an_engine_for_a_broken_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DUMP, raising=False)
    with _environment(EngineOptions(model="m", device="cuda", max_model_len=64), "3"):
        assert (os.environ[DUMP], os.environ["CUDA_VISIBLE_DEVICES"]) == ("0", "3")
    assert DUMP not in os.environ


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DUMP, "1")
    with _environment(EngineOptions(model="m", device="cuda", max_model_len=64), None):
        assert os.environ[DUMP] == "1"
