"""The recorded runs of `trinity ui --demo`: demo.tar.xz, which docs/record_demo.py makes."""

import contextlib
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

ARCHIVE = Path(__file__).parent / "demo.tar.xz"


@contextlib.contextmanager
def unpacked() -> Iterator[Path]:
    """Yields a folder of runs, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="trinity-demo-") as folder:
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)
