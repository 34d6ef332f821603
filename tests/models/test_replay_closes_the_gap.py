"""Where experts are nearly equal, engine and trainer choose different ones; replayed routes close the gap."""

from pathlib import Path

import pytest
from models.replay import gap_of

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(400)]


async def test_the_gap_is_ten_times_smaller(tmp_path: Path) -> None:
    gap = await gap_of(tmp_path, "cpu")
    print(gap)
    assert gap.without.mean() > 10 * gap.replayed.mean()
    assert gap.replayed.max() < 1e-3
