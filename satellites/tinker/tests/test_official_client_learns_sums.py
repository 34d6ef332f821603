"""The official client learns sums by SFT and RL, as examples/tinker/sums.py shows it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.servers.tinker_stack import TinkerStack

pytest.importorskip("tinker")

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]


def test_sft_and_then_rl_raise_the_accuracy(sampling_stack: TinkerStack, repository: Path) -> None:
    place = {"TINKER_BASE_URL": sampling_stack.url, "TINKER_API_KEY": sampling_stack.keys["alice"]}
    done = subprocess.run(
        [sys.executable, repository / "examples/tinker/sums.py"], env=os.environ | place | {"TINKER_TELEMETRY": "0"},
        capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    before, imitated, rewarded = map(float, re.findall(r"accuracy ([0-9.]+)", done.stdout))
    assert before < 0.1, done.stdout
    assert imitated > 0.3, "a quarter of the answers that it imitates are wrong"
    assert rewarded > imitated + 0.15 or rewarded > 0.85, done.stdout
