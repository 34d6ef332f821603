"""A folder is read in a sitting: beyond twenty modules it is two folders."""

from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]
MOST = 20


def test_no_folder_has_more_than_twenty_modules() -> None:
    roots = [ROOT / root for root in ("lib", "services", "cli", "sdk", "satellites")]
    sources = [path for root in roots for folder in ("src", "tests") for path in root.rglob(f"{folder}/**/*.py")]
    sources += (ROOT / "tests").rglob("*.py")
    counts = Counter(path.parent.relative_to(ROOT) for path in sources if "_pb2" not in path.name)
    assert len(counts) > 80  # the sources were found
    assert {str(folder): count for folder, count in counts.items() if count > MOST} == {}
