"""Writing weights as safetensors shards, and making them a version through the sync service."""

import json
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import grpc
import structlog
import torch
from safetensors.torch import save_file

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.runtime import files, rpc
from trinity.runtime.weights import FileInfo, FolderOffer, Manifest, TensorInfo, manifest_to_proto

log = structlog.get_logger(__name__)

_SHARD_BYTES = 2 * 1024**3
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_STAGE_SECONDS = 600.0
_RETRY_SECONDS = 0.5


def write_shards(
    weights: Iterable[tuple[str, torch.Tensor]], folder: Path, pattern: str, shard_bytes: int = _SHARD_BYTES
) -> tuple[list[TensorInfo], list[str]]:
    """Write tensors in order into files of about `shard_bytes`; `pattern` names them, as "part-{:05d}.safetensors"."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: list[TensorInfo] = []
    names: list[str] = []
    for shard in _shards(weights, shard_bytes):
        name = pattern.format(len(names))
        save_file(shard, folder / name, metadata={"format": "pt"})
        names.append(name)
        tensors += [
            TensorInfo(key, _DTYPES[value.dtype], tuple(value.shape), value.numel() * value.element_size(), name)
            for key, value in shard.items()
        ]
    return tensors, names


def _shards(weights: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        copy = tensor.detach().to("cpu", copy=True).contiguous()
        if shard and size + copy.numel() * copy.element_size() > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = copy
        size += copy.numel() * copy.element_size()
    if shard:
        yield shard


def write_huggingface_index(folder: Path, tensors: list[TensorInfo], names: list[str]) -> None:
    """What transformers needs to read several shards; one shard is renamed to model.safetensors."""
    if len(names) == 1:
        (folder / names[0]).rename(folder / "model.safetensors")
        return
    index = {
        "metadata": {"total_size": sum(tensor.size_bytes for tensor in tensors)},
        "weight_map": {tensor.name: tensor.file for tensor in tensors},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


class Publisher:
    """Makes versions: files in a folder of their own, then Stage, then Commit. Rank 0 alone."""

    def __init__(self, address: str, run: str, root: Path) -> None:
        self._stub = sync_pb2_grpc.SyncServiceStub(rpc.blocking_channel(address))
        self._run = run
        self._root = root
        self.newest_step = -1
        self.live_version = -1

    def open(self, base_model: str) -> None:
        """Find the newest version; make the base model version 0 if there is none."""
        request = pb.ListVersionsRequest(run=self._run, limit=100)
        known = self._call(lambda: self._stub.ListVersions(request, timeout=30)).versions
        usable = [v for v in known if v.state in (pb.VERSION_STATE_LIVE, pb.VERSION_STATE_RETIRED)]
        if usable:
            self.newest_step = max(version.manifest.step for version in usable)
            self.live_version = max(version.manifest.version for version in usable)
            return
        manifest = Manifest(self._run, 0, 0, (), (), (), time.time(), base_model)
        self._announce(manifest)

    def publish(self, step: int, weights: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        """Publish the weights of a step under the step's own number."""
        assert weights is not None
        folder = self._root / f"v{step}"
        partial = self._root / f".v{step}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        tensors, names = write_shards(weights, partial, "part-{:05d}.safetensors")
        infos = tuple(FileInfo(name, (partial / name).stat().st_size, files.checksum(partial / name)) for name in names)
        partial.rename(folder)
        offer = FolderOffer(str(folder.absolute()))
        self._announce(Manifest(self._run, step, step, tuple(tensors), infos, (offer,), time.time()))

    def _announce(self, manifest: Manifest) -> None:
        stage = pb.StageRequest(manifest=manifest_to_proto(manifest))
        self._call(lambda: self._stub.Stage(stage, timeout=_STAGE_SECONDS))
        commit = pb.CommitRequest(run=self._run, version=manifest.version)
        response = self._call(lambda: self._stub.Commit(commit, timeout=60))
        self.newest_step, self.live_version = manifest.step, manifest.version
        for version in response.collectable:
            shutil.rmtree(self._root / f"v{version}", ignore_errors=True)

    def _call(self, call):  # type: ignore[no-untyped-def]
        """The service may be restarting: again until it answers. Refusals are raised."""
        while True:
            try:
                return call()
            except grpc.RpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise
                log.info("trainer.sync.retry", code=error.code().name, details=error.details())
            time.sleep(_RETRY_SECONDS)
