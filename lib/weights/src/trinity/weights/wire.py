"""Manifests as protobuf messages, there and back."""

from typing import Any

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.runtime.errors import InvalidInput
from trinity.weights.lora import Lora, LoraTarget
from trinity.weights.manifest import (
    Canary,
    CollectiveOffer,
    Delta,
    FileInfo,
    FolderOffer,
    JetStreamOffer,
    Manifest,
    Offer,
    Probe,
    S3Offer,
    TensorInfo,
)


def manifest_to_proto(manifest: Manifest) -> pb.Manifest:
    return pb.Manifest(
        run=manifest.run,
        version=manifest.version,
        step=manifest.step,
        tensors=[
            pb.TensorInfo(
                name=t.name, dtype=t.dtype, shape=t.shape, size_bytes=t.size_bytes, file=t.file, checksum=t.checksum
            )
            for t in manifest.tensors
        ],
        files=_files(manifest.files),
        offers=[_offer(offer) for offer in manifest.offers],
        created_at_seconds=manifest.created_at_seconds,
        base_model=manifest.base_model,
        delta=_delta(manifest.delta),
        canary=_canary(manifest.canary),
        lora=_lora(manifest.lora),
    )


def manifest_from_proto(message: pb.Manifest) -> Manifest:
    """Unknown kinds of offers, from newer writers, are ignored."""
    return Manifest(
        run=message.run,
        version=message.version,
        step=message.step,
        tensors=tuple(
            TensorInfo(t.name, t.dtype, tuple(t.shape), t.size_bytes, t.file, t.checksum) for t in message.tensors
        ),
        files=_infos(message.files),
        offers=tuple(offer for offer in map(_from_offer, message.offers) if offer is not None),
        created_at_seconds=message.created_at_seconds,
        base_model=message.base_model,
        delta=Delta(message.delta.base_version, _infos(message.delta.files)) if message.HasField("delta") else None,
        canary=_from_canary(message.canary) if message.HasField("canary") else None,
        lora=_from_lora(message.lora) if message.HasField("lora") else None,
    )


def decode_manifest(data: bytes) -> Manifest:
    """A manifest as stored beside a version's files. Raises InvalidInput if it is not one."""
    try:
        return manifest_from_proto(pb.Manifest.FromString(data))
    except Exception as error:
        raise InvalidInput("manifest", f"cannot be read: {error}") from None


def _files(infos: tuple[FileInfo, ...]) -> list[pb.File]:
    return [pb.File(name=f.name, size_bytes=f.size_bytes, checksum=f.checksum) for f in infos]


def _infos(messages: Any) -> tuple[FileInfo, ...]:
    return tuple(FileInfo(f.name, f.size_bytes, f.checksum) for f in messages)


def _offer(offer: Offer) -> pb.Offer:
    match offer:
        case FolderOffer(path, delta):
            return pb.Offer(folder=pb.FolderOffer(path=path), delta=delta)
        case S3Offer(bucket, prefix, endpoint, delta):
            return pb.Offer(s3=pb.S3Offer(bucket=bucket, prefix=prefix, endpoint=endpoint), delta=delta)
        case JetStreamOffer(prefix, delta):
            return pb.Offer(jetstream=pb.JetStreamOffer(prefix=prefix), delta=delta)
        case CollectiveOffer(epoch, bucket_bytes):
            return pb.Offer(collective=pb.CollectiveOffer(epoch=epoch, bucket_bytes=bucket_bytes))


def _from_offer(message: pb.Offer) -> Offer | None:
    match message.WhichOneof("transport"):
        case "folder":
            return FolderOffer(message.folder.path, message.delta)
        case "s3":
            return S3Offer(message.s3.bucket, message.s3.prefix, message.s3.endpoint, message.delta)
        case "jetstream":
            return JetStreamOffer(message.jetstream.prefix, message.delta)
        case "collective":
            return CollectiveOffer(message.collective.epoch, message.collective.bucket_bytes)
    return None


def _delta(delta: Delta | None) -> pb.Delta | None:
    return pb.Delta(base_version=delta.base_version, files=_files(delta.files)) if delta else None


def _lora(lora: Lora | None) -> pb.Lora | None:
    if lora is None:
        return None
    targets = [pb.LoraTarget(name=target.name, shape=target.shape) for target in lora.targets]
    return pb.Lora(rank=lora.rank, alpha=lora.alpha, targets=targets)


def _from_lora(message: pb.Lora) -> Lora:
    targets = tuple(LoraTarget(target.name, tuple(target.shape)) for target in message.targets)
    return Lora(message.rank, message.alpha, targets)


def _canary(canary: Canary | None) -> pb.Canary | None:
    if canary is None:
        return None
    probes = [pb.Probe(token_ids=probe.token_ids, logprobs=probe.logprobs) for probe in canary.probes]
    return pb.Canary(probes=probes, mean_tolerance=canary.mean_tolerance, max_tolerance=canary.max_tolerance)


def _from_canary(message: pb.Canary) -> Canary:
    probes = tuple(Probe(tuple(probe.token_ids), tuple(probe.logprobs)) for probe in message.probes)
    return Canary(probes, message.mean_tolerance, message.max_tolerance)
