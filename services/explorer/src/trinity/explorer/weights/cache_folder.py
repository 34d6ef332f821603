"""Where an explorer keeps the versions that it fetches."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import structlog

from trinity.runtime.process import FileLock

log = structlog.get_logger(__name__)

_TEMPORARY, _LOCK = "trinity-weights-", ".lock"


@contextlib.contextmanager
def cache_folder(given: Path | None, explorer_id: str) -> Iterator[Path]:
    """A folder for this explorer's cache: in the given one, or a temporary one that is removed after the process."""
    if given is not None:
        (given / explorer_id).mkdir(parents=True, exist_ok=True)
        yield given / explorer_id
        return
    made = Path(tempfile.mkdtemp(prefix=f".{_TEMPORARY}"))  # no cleanup searches for this name
    lock = FileLock(made / _LOCK)
    lock.acquire()
    folder = made.rename(made.with_name(made.name.removeprefix(".")))
    _remove_abandoned(folder.parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _remove_abandoned(parent: Path) -> None:
    """Remove folders of explorers that were killed. A file lock ends with its process, in any container."""
    for path in parent.glob(f"{_TEMPORARY}*/{_LOCK}"):
        lock = FileLock(path)
        with contextlib.suppress(OSError):  # another user's
            if lock.acquire():
                shutil.rmtree(path.parent, ignore_errors=True)
                log.info("explorer.cache.removed", path=str(path.parent))
                lock.release()
