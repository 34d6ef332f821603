"""Loads one version into the engines, by collective group or storage, and computes its canary afterwards.

Files come from the cache of transports, or for version 0 from the model that the engines began with. They are fetched
and checked before the engines pause. Only a version that is not LIVE yet is loaded from a folder while its files are
checked: its tokens wait for the verdict, and it is LIVE sooner. A failed load leaves the engines paused with part of
the weights new: only another full load resumes them.
"""

import asyncio
import contextlib
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog

from trinity.explorer.types import EngineFailed
from trinity.explorer.weights.load_history import LoadHistory
from trinity.runtime import tracing
from trinity.runtime.errors import InvalidInput, TrinityError, Unavailable
from trinity.runtime.metrics import Gauge, Histogram
from trinity.runtime.process import FileLock
from trinity.weights.lora import Lora
from trinity.weights.manifest import Canary, Manifest, Measured, check_files, manifest_of_folder
from trinity.weights.stores.cache import WeightCache

Result = TypeVar("Result")

log = structlog.get_logger(__name__)

PAUSE = Histogram(
    "trinity_explorer_update_pause_seconds",
    "Pause of the engines for one update, in seconds",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)
CANARY = Gauge("trinity_explorer_canary_max_error_nats", "Largest difference of the newest canary, in nats")

_BASE_SECONDS = 120.0
_FORGET_SECONDS = 60.0
_FETCH_SECONDS = 120.0
_SLOWEST_BYTES_PER_SECOND = 10e6
_TEMPORARY, _LOCK = "trinity-weights-", ".lock"


class Engines(Protocol):
    """The part of EnginePool that the loader needs."""

    loads: LoadHistory

    async def load(self, version: int, update_info: dict[str, Any]) -> tuple[int, float]: ...
    async def measure(self, canary: Canary) -> Measured: ...


class Collective(Protocol):
    """The part of member.CollectiveMember that the loader needs."""

    async def ready(self, manifest: Manifest) -> dict[str, Any] | None:
        """Update info of a broadcast that the engines receive now; None if the version comes another way. Called at
        most once for each version."""

    def decline(self, manifest: Manifest) -> None:
        """Tell the others, in the background, not to wait for this explorer."""


@dataclass(frozen=True)
class Loaded:
    """A loaded version. `right`: the engines compute its canary right, or it has none.

    For the initial model `transport` is empty and the pause 0.
    """

    manifest: Manifest
    serial: int
    transport: str
    pause_seconds: float
    measured: Measured | None
    right: bool


class Loader:
    """Loads versions into the engines, one at a time."""

    def __init__(
        self,
        engines: Engines,
        cache: WeightCache,
        base_model: str,
        collective: Collective | None = None,
        collective_transport: str = "collective",
        merges: bool = True,
    ) -> None:
        """`merges`: the engines merge adapters with the base model, instead of holding them."""
        self.loads = engines.loads
        self._engines = engines
        self._cache = cache
        self._base_model = base_model
        self._collective = collective
        self._collective_transport = collective_transport
        self._merges = merges
        self._fetch = fetch if merges else fetch_adapters
        self._answered: set[int] = set()  # versions whose broadcast was taken, missed or declined
        self._failed: set[int] = set()  # versions whose load broke off: their files are checked first from then on
        self.updating = False

    async def load(
        self, manifest: Manifest, is_live: Callable[[], bool], still_wanted: Callable[[], bool]
    ) -> Loaded | None:
        """Load a version. Returns None if it was no longer wanted before the engines paused.

        A LIVE version whose canary fails is loaded again in full, since other explorers could load it. So is any
        version whose load broke off. Raises EngineFailed if the second load breaks off too, InvalidInput and
        Unavailable if the files cannot be fetched.
        """
        if not manifest.files and self.loads.newest == 0:
            loaded = await self._check(manifest, self.loads.accept_initial_weights(), "", 0.0)
            if loaded.right or not is_live():
                return loaded
        received = await self._receive(manifest)
        if received is not None and received.right:
            return received
        return await self._load_files(manifest, is_live, still_wanted)

    def decline(self, manifest: Manifest) -> None:
        """Tell the collective group not to wait for this explorer, if a broadcast of this version may still come."""
        if (group := self._offered(manifest)) is not None:
            group.decline(manifest)

    async def forget_all_but(self, versions: Iterable[int]) -> None:
        """Remove fetched files of all other versions."""
        with contextlib.suppress(Unavailable):  # a fetch that timed out may still hold the cache
            await run_in_daemon_thread(_FORGET_SECONDS, self._cache.keep_only, versions)

    def _offered(self, manifest: Manifest) -> Collective | None:
        """The group that will broadcast this version; None after the first call for a version."""
        if manifest.collective is None or manifest.version in self._answered:
            return None
        self._answered.add(manifest.version)
        return self._collective

    async def _receive(self, manifest: Manifest) -> Loaded | None:
        """Load by the collective group. Returns None if this explorer is not in it or the load failed."""
        group = self._offered(manifest)
        if group is None:
            return None
        base = await run_in_daemon_thread(_BASE_SECONDS, base_of, manifest.lora, self._base_model)
        update_info = await group.ready(manifest)
        if update_info is None:
            return None
        try:
            return await self._put(manifest, {**update_info, **base}, self._collective_transport)
        except EngineFailed as error:
            log.warning("explorer.weights.broadcast_failed", version=manifest.version, error=str(error))
            return None

    async def _load_files(
        self, manifest: Manifest, is_live: Callable[[], bool], still_wanted: Callable[[], bool]
    ) -> Loaded | None:
        for again in (False, True):
            limit = fetch_seconds(manifest)
            place: tuple[dict[str, Any], str] | None = None
            if self._merges and manifest.version not in self._failed and not is_live():
                place = await run_in_daemon_thread(limit, _in_place, self._cache, manifest, self._base_model)
            if place is not None:
                update_info, transport = place
            else:
                update_info, transport = await run_in_daemon_thread(
                    limit, self._fetch, self._cache, manifest, self._base_model
                )
            if not still_wanted():
                return None
            try:
                async with _checking(manifest, update_info, limit) if place else contextlib.nullcontext() as checked:
                    loaded = await self._put(manifest, update_info, transport, checked)
            except EngineFailed as error:
                log.warning("explorer.weights.load_failed", version=manifest.version, error=str(error))
                self._failed.add(manifest.version)
                if again:
                    raise
                continue
            if loaded.right or again or not is_live():
                return loaded
        return None

    async def _put(
        self, manifest: Manifest, update_info: dict[str, Any], transport: str, checked: Awaitable[None] | None = None
    ) -> Loaded:
        told: dict[str, Any] = {"version": manifest.version, "step": manifest.step, "transport": transport}
        with tracing.span("weights.load", **told):
            self.updating = True
            try:
                serial, pause = await self._engines.load(manifest.version, update_info)
            finally:
                self.updating = False
            PAUSE.observe(pause)
            log.info("explorer.weights.loaded", **told, pause=round(pause, 4))
            return await self._check(manifest, serial, transport, pause, checked)

    async def _check(
        self, manifest: Manifest, serial: int, transport: str, pause: float, checked: Awaitable[None] | None = None
    ) -> Loaded:
        """Compute the canary and record the result in the history. Raises EngineFailed if `checked` finds damage."""
        loads, canary = self.loads, manifest.canary
        measured: Measured | None = None
        if canary is not None:
            try:
                measured = await self._engines.measure(canary)
            except EngineFailed as error:
                loads.mark_bad(serial, f"could not be checked: {error}")
                raise
        if checked is not None:
            try:
                await checked
            except (TrinityError, OSError) as error:
                loads.mark_bad(serial, f"was loaded from damaged files: {error}")
                raise EngineFailed(f"loaded damaged files: {error}") from error
        if canary is not None and measured is not None:
            CANARY.set(measured.max_error)
            if not measured.within(canary, loads.precision):
                log.error("explorer.canary.failed", version=manifest.version, transport=transport, found=str(measured))
                loads.mark_bad(serial, f"failed its canary: {measured}")
                return Loaded(manifest, serial, transport, pause, measured, right=False)
        loads.pass_canary(serial)
        return Loaded(manifest, serial, transport, pause, measured, right=True)


def fetch(cache: WeightCache, manifest: Manifest, base_model: str) -> tuple[dict[str, Any], str]:
    """Fetch a version to the local disk and verify it. Returns worker.UpdateInfo's fields and the transport.

    Blocks. Raises InvalidInput or Unavailable.
    """
    if not manifest.files:
        folder, transport = base_folder(base_model), "folder"
        manifest = manifest_of_folder(manifest.run, 0, folder, checksums=False)
    else:
        fetched = cache.fetch(manifest)
        folder, transport = fetched.folder, fetched.transport
    return _update_info(manifest, folder, base_model), transport


def _in_place(cache: WeightCache, manifest: Manifest, base_model: str) -> tuple[dict[str, Any], str] | None:
    """Does the same for files in a folder that this explorer sees, unchecked. Returns None for others."""
    folder = cache.in_place(manifest) if manifest.files else None
    return None if folder is None else (_update_info(manifest, folder, base_model), "folder")


def _update_info(manifest: Manifest, folder: Path, base_model: str) -> dict[str, Any]:
    files, tensors = manifest.load_arguments(folder)
    update_info = {"files": files, "tensors": [list(tensor) for tensor in tensors]}
    return {**update_info, **base_of(manifest.lora, base_model)}


def fetch_adapters(cache: WeightCache, manifest: Manifest, base_model: str) -> tuple[dict[str, Any], str]:
    """Does the same for engines that hold adapters unmerged. Returns `lora` and `files`; no files: the base model."""
    if not manifest.files:
        return {"lora": None, "files": []}, "folder"
    if manifest.lora is None:
        raise InvalidInput(
            "manifest.lora", f"is empty; engines with merged: false cannot load version {manifest.version}"
        )
    base_of(manifest.lora, base_model)  # the adapters fit
    fetched = cache.fetch(manifest)
    files, _ = manifest.load_arguments(fetched.folder)
    return {"lora": manifest.lora, "files": files}, fetched.transport


def base_of(lora: Lora | None, base_model: str) -> dict[str, Any]:
    """Fields of worker.UpdateInfo for the base of adapters; none for whole models. Blocks. Raises InvalidInput."""
    if lora is None:
        return {}
    folder = base_folder(base_model)
    base = manifest_of_folder("base", 0, folder, checksums=False)
    lora.check_base({tensor.name: tensor.shape for tensor in base.tensors})
    files, tensors = base.load_arguments(folder)
    return {"base_files": files, "base_tensors": [list(tensor) for tensor in tensors], "lora": lora.plain()}


def base_folder(model: str) -> Path:
    """The folder of a model given by path or hub name; nothing is downloaded. Raises InvalidInput."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except Exception as error:  # errors of the hub, also for invalid names
        raise InvalidInput(
            "model.model_path", f"{model!r} is neither a folder nor a downloaded model: {error}"
        ) from None


def fetch_seconds(manifest: Manifest) -> float:
    """Time limit of a fetch. A store or a remote folder that hangs longer counts as unreachable."""
    return _FETCH_SECONDS + manifest.size_bytes / _SLOWEST_BYTES_PER_SECOND


@contextlib.asynccontextmanager
async def _checking(
    manifest: Manifest, update_info: dict[str, Any], limit_seconds: float
) -> AsyncIterator[Awaitable[None]]:
    """Check files in a thread while the body runs, which may wait for the result."""
    folder = Path(update_info["files"][0]).parent
    checked = asyncio.ensure_future(run_in_daemon_thread(limit_seconds, check_files, manifest, folder))
    try:
        yield checked
    finally:
        checked.cancel()
        await asyncio.gather(checked, return_exceptions=True)


async def run_in_daemon_thread(limit_seconds: float, call: Callable[..., Result], *arguments: Any) -> Result:
    """Run a call in a thread that blocks neither the caller nor the exit of the process if it hangs.

    Raises Unavailable after the limit. The call then continues in its thread, and its result is dropped.
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
    """A folder for this explorer's cache: in the given folder, or a temporary folder that is removed at the end."""
    if given is not None:
        (given / explorer_id).mkdir(parents=True, exist_ok=True)
        yield given / explorer_id
        return
    made = Path(tempfile.mkdtemp(prefix=f".{_TEMPORARY}"))  # not matched by _remove_abandoned
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
    """Remove folders of killed explorers. A file lock ends with its process, in any container."""
    for path in parent.glob(f"{_TEMPORARY}*/{_LOCK}"):
        lock = FileLock(path)
        with contextlib.suppress(OSError):  # a folder of another user
            if lock.acquire():
                shutil.rmtree(path.parent, ignore_errors=True)
                log.info("explorer.cache.removed", path=str(path.parent))
                lock.release()
