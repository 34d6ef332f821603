"""Checks of a manifest before its version is registered. Refusals name the field and change nothing."""

import asyncio

from trinity.runtime.errors import Conflict, InvalidInput, NotFound
from trinity.sync.store.manifests import Manifests, digest_of
from trinity.sync.store.records import Record
from trinity.sync.store.state import RunState, judge
from trinity.weights import FolderOffer, Manifest, TensorInfo, VersionState, check_files

_SHOWN = 3


async def examine(manifest: Manifest, state: RunState, manifests: Manifests) -> tuple[Record, InvalidInput | None]:
    """The record to register, judged as far as possible here, and the problem of its files.

    They are compared with the manifest where this host sees them: REJECTED if they differ. Without a canary the version
    is VERIFIED then, with one it is STAGED. Raises InvalidInput, or Conflict for a base that cannot be used.
    """
    await _check_tensors(manifest, state, manifests)
    if manifest.delta is not None:
        await _check_base(manifest.delta.base_version, state)
    verdict = VersionState.VERIFIED if manifest.canary is None else VersionState.STAGED
    problem: InvalidInput | None = None
    folder = manifest.folder
    if folder is not None and folder.is_dir():
        try:
            await asyncio.to_thread(check_files, manifest, folder)
        except InvalidInput as error:
            verdict, problem = VersionState.REJECTED, error
    elif folder is not None and manifest.canary is None and _only_folders(manifest):
        raise InvalidInput(
            "manifest.offers",
            f"{folder} is no folder that the sync service sees, so the files would stay unchecked; "
            "give the version a canary, or mount the folder here",
        )
    record = Record(
        version=manifest.version,
        step=manifest.step,
        digest=digest_of(manifest),
        state=verdict,
        reason=str(problem or ""),
        has_tensors=bool(manifest.tensors),
        has_canary=manifest.canary is not None,
        base_version=manifest.delta.base_version if manifest.delta else -1,
        epoch=manifest.collective.epoch if manifest.collective else 0,
    )
    return record, problem


def _only_folders(manifest: Manifest) -> bool:
    return all(isinstance(offer, FolderOffer) for offer in manifest.offers)


async def _check_tensors(manifest: Manifest, state: RunState, manifests: Manifests) -> None:
    """Every version of a run has the same tensors: the same names, dtypes and shapes."""
    newest = next((record for record in state.newest_first if _sets_tensors(record, manifest, state)), None)
    if newest is None or not manifest.tensors:
        return
    before = {tensor.name: tensor for tensor in (await manifests.get(newest)).tensors}
    now = {tensor.name: tensor for tensor in manifest.tensors}
    for names, what in ((before.keys() - now.keys(), "lacks"), (now.keys() - before.keys(), "has the new")):
        if names:
            raise InvalidInput("manifest.tensors", f"{what} {_some(names)}, unlike version {newest.version}")
    for name, tensor in now.items():
        is_now, was = _form(tensor), _form(before[name])
        if is_now != was:
            raise InvalidInput("manifest.tensors", f"{name} is {is_now}, in version {newest.version} it is {was}")


def _sets_tensors(record: Record, manifest: Manifest, state: RunState) -> bool:
    """Whether others are compared with it. What a check has refused may be what is wrong."""
    is_other = record.version != manifest.version
    return is_other and record.has_tensors and judge(record, state.live).state is not VersionState.REJECTED


def _form(tensor: TensorInfo) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


async def _check_base(version: int, state: RunState) -> None:
    field = "manifest.delta.base_version"
    try:
        base = await state.record(version)
    except NotFound:
        raise InvalidInput(field, f"is {version}, which this run does not have; publish a whole version") from None
    judged = judge(base, await state.pointer())
    if judged.state is VersionState.REJECTED:
        raise Conflict(f"{field}: {version} is REJECTED ({judged.reason}); publish a whole version")
    if base.collected:
        raise Conflict(f"{field}: the files of {version} may be deleted already; publish a whole version")
