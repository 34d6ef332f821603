"""Conversion of manifests and of JetStream's closing entries to and from protobuf."""

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from typing import get_args

from trinity.api.common.v1 import experience_pb2
from trinity.api.explorer.v1 import explorer_pb2
from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.runtime.errors import InvalidInput
from trinity.runtime.messages import from_message, to_message
from trinity.weights.manifest import CollectiveOffer, Manifest, Offer

_OFFERS = {kind.transport: kind for kind in get_args(Offer)}


class VersionState(IntEnum):
    STAGED = pb.VERSION_STATE_STAGED
    VERIFIED = pb.VERSION_STATE_VERIFIED
    LIVE = pb.VERSION_STATE_LIVE
    RETIRED = pb.VERSION_STATE_RETIRED
    REJECTED = pb.VERSION_STATE_REJECTED

    @property
    def wire_name(self) -> str:
        """Name of the protobuf value."""
        return f"VERSION_STATE_{self.name}"


class ExplorerState(IntEnum):
    """The states of explorer.v1.ExplorerState. UNKNOWN stands for any state that only newer explorers report."""

    UNKNOWN = explorer_pb2.EXPLORER_STATE_UNSPECIFIED
    STARTING = explorer_pb2.EXPLORER_STATE_STARTING
    RUNNING = explorer_pb2.EXPLORER_STATE_RUNNING
    WAITING = explorer_pb2.EXPLORER_STATE_WAITING
    WAITING_FOR_LOG = explorer_pb2.EXPLORER_STATE_WAITING_FOR_LOG
    UPDATING = explorer_pb2.EXPLORER_STATE_UPDATING
    EVALUATING = explorer_pb2.EXPLORER_STATE_EVALUATING
    SERVING = explorer_pb2.EXPLORER_STATE_SERVING
    DRAINING = explorer_pb2.EXPLORER_STATE_DRAINING
    WAITING_FOR_PROVIDER = explorer_pb2.EXPLORER_STATE_WAITING_FOR_PROVIDER

    @classmethod
    def _missing_(cls, value: object) -> "ExplorerState":
        return cls.UNKNOWN

    @property
    def wire_name(self) -> str:
        """Name of the protobuf value."""
        return f"EXPLORER_STATE_{self.name}"

    @property
    def text(self) -> str:
        """The state in commands' output: "waiting for log"."""
        return self.name.lower().replace("_", " ")


def manifest_to_proto(manifest: Manifest) -> pb.Manifest:
    return to_message(manifest, pb.Manifest, offers=[_offer(offer) for offer in manifest.offers])


def encode_manifest(manifest: Manifest) -> bytes:
    """Encodes a manifest for storage; equal manifests give equal bytes."""
    return manifest_to_proto(manifest).SerializeToString(deterministic=True)


def digest_of(manifest: Manifest) -> bytes:
    """Returns SHA-256 of what a version is, as sync.v1.Manifest.parent_sha256 says: not of the places that offer it."""
    message = manifest_to_proto(manifest)
    message.ClearField("offers")
    message.ClearField("delta")
    return hashlib.sha256(message.SerializeToString(deterministic=True)).digest()


def manifest_from_proto(message: pb.Manifest) -> Manifest:
    """Ignores unknown kinds of offers, which newer writers may add."""
    offers = (_from_offer(offer) for offer in message.offers)
    return from_message(Manifest, message, offers=tuple(offer for offer in offers if offer is not None))


def decode_manifest(data: bytes) -> Manifest:
    """Decodes the result of `encode_manifest`. Raises InvalidInput for other bytes."""
    try:
        return manifest_from_proto(pb.Manifest.FromString(data))
    except Exception as error:
        raise InvalidInput("manifest", f"cannot be read: {error}") from None


@dataclass(frozen=True)
class Blob:
    """The closing entry of a file in JetStream: its xxh3-128, its bytes and the number of its chunks."""

    key: str
    size_bytes: int
    chunks: int


def encode_blob(blob: Blob) -> bytes:
    return to_message(blob, experience_pb2.BlobReference).SerializeToString()


def decode_blob(data: bytes) -> Blob:
    return from_message(Blob, experience_pb2.BlobReference.FromString(data))


def _offer(offer: Offer) -> pb.Offer:
    address = dict(vars(offer))
    return pb.Offer(delta=address.pop("delta", False), **{offer.transport: address})


def _from_offer(message: pb.Offer) -> Offer | None:
    transport = message.WhichOneof("transport")
    if transport not in _OFFERS:
        return None
    kind = _OFFERS[transport]
    own = {} if kind is CollectiveOffer else {"delta": message.delta}
    return from_message(kind, getattr(message, transport), **own)
