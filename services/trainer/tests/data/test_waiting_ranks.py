"""Ranks wait together for what only rank 0 can see, for longer than an exchange may last."""

from pathlib import Path

import pytest

from support.trainer.engine_actions import run_module
from support.trainer.waiting_ranks import LATE_SECONDS, TIMEOUT_SECONDS

pytestmark = pytest.mark.core


def test_a_batch_that_is_late_ends_no_rank(tmp_path: Path) -> None:
    assert LATE_SECONDS > 2 * TIMEOUT_SECONDS
    run_module("support.trainer.waiting_ranks", tmp_path, 2, 60)
    assert [(tmp_path / str(rank)).read_bytes() for rank in range(2)] == [b"a batch"] * 2
