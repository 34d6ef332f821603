"""A folder is read in a sitting: beyond twenty modules it is two folders."""

from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]
MOST = 20


def test_no_folder_has_more_than_twenty_modules() -> None:
    sources = [path for root in ("lib", "services", "cli", "sdk") for path in (ROOT / root).rglob("src/**/*.py")]
    counts = Counter(path.parent.relative_to(ROOT) for path in sources if "_pb2" not in path.name)
    assert len(counts) > 30  # the sources were found
    assert {str(folder): count for folder, count in counts.items() if count > MOST} == {}
