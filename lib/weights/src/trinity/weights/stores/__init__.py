"""Storage of versions: one class for each transport. base.py states the contract of all of them."""

import importlib.util
import re
from pathlib import Path
from urllib.parse import urlsplit

from trinity.runtime.errors import InvalidInput
from trinity.weights.manifest import FolderOffer, JetStreamOffer, Offer, S3Offer
from trinity.weights.stores.base import MANIFEST, Store, endpoint_of_environment
from trinity.weights.stores.folder import FolderStore

__all__ = ["MANIFEST", "FolderStore", "Store", "open_offer", "open_store", "usable_kinds"]

_FIELD = "synchronizer.storage"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


def open_store(entry: str, run: str, *, folder: Path, nats_url: str) -> Store:
    """Opens the store of an entry of synchronizer.storage; `folder` is the run's own, for the entry "folder".

    Raises InvalidInput naming an invalid entry. Connects on first use.
    """
    if entry == "folder":
        return FolderStore(folder, run)
    if entry == "jetstream":
        return _jetstream(run, nats_url)
    if entry.startswith("s3://"):
        url = urlsplit(entry)
        if not url.netloc or url.query or url.fragment:
            raise InvalidInput(_FIELD, f"{entry!r} must be s3://bucket or s3://bucket/prefix")
        return _s3(url.netloc, "/".join(part for part in (url.path.strip("/"), run) if part), run)
    if entry.startswith("/"):
        return FolderStore(Path(entry) / run, run)
    raise InvalidInput(_FIELD, f"{entry!r} is none of folder, an absolute path, s3://bucket/prefix, jetstream")


def open_offer(offer: Offer, run: str, *, nats_url: str) -> Store:
    """Opens the store of an offer for reading. Raises InvalidInput if this process cannot or must not read it.

    Requests to S3 are signed with credentials, so an offer does not choose their destination: the endpoint is Amazon's
    or the one in this process's AWS_ENDPOINT_URL.
    """
    match offer:
        case FolderOffer(path):
            return FolderStore(Path(path).parent, run)
        case S3Offer(bucket, prefix, endpoint):
            _check_s3(bucket, endpoint)
            return _s3(bucket, prefix.rpartition("/")[0], run)
        case JetStreamOffer():
            return _jetstream(run, nats_url)
    raise InvalidInput("manifest.offers", f"{type(offer).__name__} is no storage")


def _check_s3(bucket: str, endpoint: str) -> None:
    if not _BUCKET.fullmatch(bucket):  # it becomes a part of the address
        raise InvalidInput("manifest.offers", f"the bucket {bucket[:100]!r} is no name of a bucket")
    if endpoint and not endpoint_of_environment():
        raise InvalidInput(
            "manifest.offers",
            f"the version is on S3 at {endpoint[:200]!r}; credentials are sent only to an endpoint that this "
            "process's own environment names: set AWS_ENDPOINT_URL",
        )


def usable_kinds(nats_url: str) -> tuple[str, ...]:
    """Returns the kinds that this process can use, best first."""
    kinds = ["folder"]
    if importlib.util.find_spec("obstore") is not None:
        kinds.append("s3")
    if nats_url:
        kinds.append("jetstream")
    return tuple(kinds)


def _s3(bucket: str, root: str, run: str) -> Store:
    try:
        from trinity.weights.stores.s3 import S3Store
    except ImportError:
        raise InvalidInput(_FIELD, "s3:// needs obstore: pip install -e '.[s3]'") from None
    return S3Store(bucket, root, run)


def _jetstream(run: str, nats_url: str) -> Store:
    from trinity.weights.stores.jetstream import JetStreamStore

    if not nats_url:
        raise InvalidInput(_FIELD, "jetstream needs the address of NATS")
    return JetStreamStore(run, nats_url)
