"""Where a version's files come from: the cache of transports, or for version 0 the model the engines began with."""

import asyncio
import contextlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog

from trinity.runtime.errors import InvalidInput, Unavailable
from trinity.runtime.process import FileLock
from trinity.weights import Lora, Manifest, manifest_of_folder

Result = TypeVar("Result")

log = structlog.get_logger(__name__)

_FETCH_SECONDS = 120.0
_SLOWEST_BYTES_PER_SECOND = 10e6
_TEMPORARY, _LOCK = "trinity-weights-", ".lock"


class Fetched(Protocol):
    """A folder with all files of a version, checked."""

    @property
    def folder(self) -> Path: ...
    @property
    def transport(self) -> str: ...


class Cache(Protocol):
    """The part of trinity.weights.stores.cache.WeightCache that is needed here. Its calls block."""

    def fetch(self, manifest: Manifest) -> Fetched:
        """Raises InvalidInput for files that are missing or damaged, Unavailable for a store that does not answer."""

    def keep_only(self, versions: Iterable[int]) -> None:
        """Forget all other versions."""


def fetch(cache: Cache, manifest: Manifest, base_model: str) -> tuple[dict[str, Any], str]:
    """What the engines are to load (worker.UpdateInfo), all of it on a local disk and checked, and by which transport.

    Blocks. Raises InvalidInput or Unavailable.
    """
    if not manifest.files:
        folder, transport = base_folder(base_model), "folder"
        manifest = manifest_of_folder(manifest.run, 0, folder, checksums=False)
    else:
        fetched = cache.fetch(manifest)
        folder, transport = fetched.folder, fetched.transport
    files, tensors = manifest.load_arguments(folder)
    update_info = {"files": files, "tensors": [list(tensor) for tensor in tensors]}
    return {**update_info, **base_of(manifest.lora, base_model)}, transport


def base_of(lora: Lora | None, base_model: str) -> dict[str, Any]:
    """What adapters are merged with, for worker.UpdateInfo; nothing for whole models. Blocks. Raises InvalidInput."""
    if lora is None:
        return {}
    folder = base_folder(base_model)
    base = manifest_of_folder("base", 0, folder, checksums=False)
    lora.check_base({tensor.name: tensor.shape for tensor in base.tensors})
    files, tensors = base.load_arguments(folder)
    return {"base_files": files, "base_tensors": [list(tensor) for tensor in tensors], "scale": lora.scale}


def base_folder(model: str) -> Path:
    """The folder of a model given by path or hub name; nothing is downloaded. Raises InvalidInput."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except Exception as error:  # the hub's own errors, and those of a name that is none
        raise InvalidInput(
            "model.model_path", f"{model!r} is neither a folder nor a downloaded model: {error}"
        ) from None


def fetch_seconds(manifest: Manifest) -> float:
    """How long a fetch may take. A store or a remote folder that hangs longer counts as unreachable."""
    return _FETCH_SECONDS + manifest.size_bytes / _SLOWEST_BYTES_PER_SECOND


async def run_in_daemon_thread(limit_seconds: float, call: Callable[..., Result], *arguments: Any) -> Result:
    """As asyncio.to_thread, but a call that hangs blocks neither the caller nor the exit of the process.

    Raises Unavailable after the limit. The call continues in its thread, and its result is dropped.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    def work() -> None:
        result, failure = None, None
        try:
            result = call(*arguments)
        except Exception as error:  # raised where the result is awaited
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, daemon=True, name=f"background-{call.__name__}").start()
    try:
        async with asyncio.timeout(limit_seconds) as limit:
            return await done
    except TimeoutError:
        if not limit.expired():
            raise
        raise Unavailable(f"{call.__name__.replace('_', ' ')} has not ended within {limit_seconds:.0f} s") from None


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
