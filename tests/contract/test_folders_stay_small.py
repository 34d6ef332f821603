"""A folder with more than 25 modules is probably two; with more than 40 it certainly is."""

import warnings
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]
LOOK, MOST = 25, 40


def test_folders_stay_small() -> None:
    roots = [ROOT / root for root in ("lib", "services", "cli", "sdk", "satellites")]
    sources = [path for root in roots for folder in ("src", "tests") for path in root.rglob(f"{folder}/**/*.py")]
    sources += (ROOT / "tests").rglob("*.py")
    counts = Counter(path.parent.relative_to(ROOT) for path in sources if "_pb2" not in path.name)
    assert len(counts) > 80  # the sources were found
    for folder, count in counts.items():
        if LOOK < count <= MOST:
            warnings.warn(f"{folder} has {count} modules: look whether two folders would read better", stacklevel=1)
    assert {str(folder): count for folder, count in counts.items() if count > MOST} == {}
