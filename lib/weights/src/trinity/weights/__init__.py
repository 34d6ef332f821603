"""Weight versions: their contents, their storage, their transport. See docs/weights.md."""

from trinity.weights.lora import Lora, LoraTarget
from trinity.weights.manifest import (
    Canary,
    CollectiveOffer,
    Delta,
    FileInfo,
    FolderOffer,
    JetStreamOffer,
    Manifest,
    Measured,
    Offer,
    Probe,
    S3Offer,
    TensorInfo,
    check_files,
    manifest_of_folder,
)
from trinity.weights.wire import (
    ExplorerState,
    VersionState,
    decode_manifest,
    encode_manifest,
    manifest_from_proto,
    manifest_to_proto,
)

__all__ = [
    "Canary",
    "CollectiveOffer",
    "Delta",
    "ExplorerState",
    "FileInfo",
    "FolderOffer",
    "JetStreamOffer",
    "Lora",
    "LoraTarget",
    "Manifest",
    "Measured",
    "Offer",
    "Probe",
    "S3Offer",
    "TensorInfo",
    "VersionState",
    "check_files",
    "decode_manifest",
    "encode_manifest",
    "manifest_from_proto",
    "manifest_of_folder",
    "manifest_to_proto",
]
