"""A buffer without a satellite ends with a sentence that names the key and the distribution."""

from pathlib import Path

import pytest

from trinity.buffer.hooks import hook
from trinity.buffer.ledger import offline
from trinity.config import make_plan
from trinity.config.load import parse
from trinity.plugins import satellites
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

RUN = """
mode: train
model: {model_path: m}
algorithm: {algorithm_type: grpo, repeat_times: 2}
buffer:
  train_batch_size: 4
  total_steps: 2
  trainer_input: {experience_buffer: {storage_type: file, path: kept.jsonl}}
"""


def test_an_installed_satellite_is_found() -> None:
    assert hook("traffic", "explorer.traffic").__name__ == "trinity.traffic"


def test_a_missing_one_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(satellites, "find", lambda name: None)
    with pytest.raises(InvalidInput, match=r"explorer\.traffic: needs trinity-traffic, which is not installed"):
        hook("traffic", "explorer.traffic")
    plan = make_plan(parse(RUN))
    with pytest.raises(InvalidInput, match=r"experience_buffer\.path: needs trinity-archive, which is not installed"):
        offline._open(plan, plan.experience_buffer)
