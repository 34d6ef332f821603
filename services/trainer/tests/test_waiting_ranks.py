"""Ranks wait together for what only rank 0 can see, for longer than an exchange may last."""

import os
from pathlib import Path

from support.forked import ForkedModule
from support.waiting_ranks import LATE_SECONDS, TIMEOUT_SECONDS
from trinity.runtime.process import free_port


def test_a_batch_that_is_late_ends_no_rank(tmp_path: Path) -> None:
    assert LATE_SECONDS > 2 * TIMEOUT_SECONDS
    port = str(free_port())
    ranks = [
        ForkedModule(
            "support.waiting_ranks", [str(tmp_path), port, str(rank)], dict(os.environ), tmp_path / f"{rank}.out"
        )
        for rank in range(2)
    ]
    codes = [rank.wait(60) for rank in ranks]
    told = "\n".join((tmp_path / f"{rank}.out").read_text()[-2000:] for rank in range(2))
    assert codes == [0, 0], told
    assert [(tmp_path / str(rank)).read_bytes() for rank in range(2)] == [b"a batch"] * 2
