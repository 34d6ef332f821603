"""S3-compatible object storage, through obstore. Endpoint and credentials come from the usual AWS_* variables."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import obstore
import xxhash
from obstore import exceptions
from obstore.store import S3Store as Objects

from trinity.runtime.errors import NotFound, PermissionDenied, Unavailable
from trinity.weights.manifest import FileInfo, Offer, S3Offer
from trinity.weights.stores.base import MANIFEST, Store, endpoint_of_environment

_PART_BYTES = 16 * 1024 * 1024
_MOST_PARTS = 9_000  # S3 allows 10,000
_CONCURRENCY = 8
_CONNECT_SECONDS = 5.0


class Bucket:
    """Objects below `root` in a bucket, by relative name, in parts that travel side by side.

    `patience_seconds` bounds one request, and all its retries. An interrupted upload leaves parts, which the bucket's
    lifecycle rule for incomplete uploads has to remove. Calls raise NotFound, PermissionDenied or Unavailable.
    """

    def __init__(self, bucket: str, root: str, *, patience_seconds: float = 30.0) -> None:
        self.bucket = bucket
        self._root = root
        self.endpoint = endpoint_of_environment()
        plain = self.endpoint.startswith("http://")
        patience = timedelta(seconds=patience_seconds)
        config = {"endpoint": self.endpoint} if self.endpoint else {}
        if "AWS_UNSIGNED_PAYLOAD" not in os.environ and not plain:
            config["unsigned_payload"] = "true"  # TLS protects the payload; signing every byte costs a core
        self._objects = Objects(
            bucket,
            config=config,  # type: ignore[arg-type]
            client_options={
                "allow_http": plain,
                "connect_timeout": timedelta(seconds=min(_CONNECT_SECONDS, patience_seconds)),
                "timeout": patience,
            },
            retry_config={"max_retries": 5, "retry_timeout": patience},
        )

    @property
    def where(self) -> str:
        return "/".join(part for part in (f"s3://{self.bucket}", self._root) if part)

    def key(self, name: str) -> str:
        return "/".join(part for part in (self._root, name) if part)

    def size(self, name: str) -> int | None:
        try:
            with self._translated(name):
                return obstore.head(self._objects, self.key(name))["size"]
        except NotFound:
            return None

    def upload(self, name: str, source: Path) -> None:
        part = max(_PART_BYTES, -(-source.stat().st_size // _MOST_PARTS))
        with self._translated(name):
            obstore.put(self._objects, self.key(name), source, chunk_size=part, max_concurrency=_CONCURRENCY)

    def write(self, name: str, content: bytes) -> None:
        with self._translated(name):
            obstore.put(self._objects, self.key(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """Writes an object unless it exists; returns False if it does."""
        try:
            with self._translated(name):
                obstore.put(self._objects, self.key(name), content, mode="create")
        except exceptions.AlreadyExistsError:
            return False
        return True

    def read(self, name: str) -> bytes | None:
        try:
            with self._translated(name):
                return bytes(obstore.get(self._objects, self.key(name)).bytes())
        except NotFound:
            return None

    def parts(self, name: str) -> Iterator[memoryview]:
        size = self.size(name) or 0
        with self._translated(name):
            for start in range(0, size, _PART_BYTES):
                yield self._range(self.key(name), start, size)

    def download(self, name: str, target: Path) -> None:
        """Writes an object to `target`, unchecked."""
        key = self.key(name)
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            with self._translated(name):
                size = obstore.head(self._objects, key)["size"]
                with ThreadPoolExecutor(_CONCURRENCY) as pool:
                    parts = range(0, size, _PART_BYTES)
                    for _ in pool.map(lambda start: _write_at(handle, self._range(key, start, size), start), parts):
                        pass
        finally:
            os.close(handle)

    def names(self, below: str) -> list[str]:
        """Returns the names of all objects whose names begin with `below`, a folder. NotFound without a bucket."""
        cut = len(self._root) + 1 if self._root else 0
        with self._translated(below):
            return [
                entry["path"][cut:] for page in obstore.list(self._objects, self.key(below) + "/") for entry in page
            ]

    def folders(self) -> list[str]:
        """Returns the names of the folders at the root. NotFound without a bucket."""
        cut = len(self._root) + 1 if self._root else 0
        with self._translated(self.where):
            found = obstore.list_with_delimiter(self._objects, self._root or None)
        return [prefix[cut:].strip("/") for prefix in found["common_prefixes"]]

    def remove(self, names: Iterable[str]) -> None:
        with self._translated(self.where):
            if keys := [self.key(name) for name in names]:
                obstore.delete(self._objects, keys)

    def _range(self, key: str, start: int, size: int) -> memoryview:
        return memoryview(obstore.get_range(self._objects, key, start=start, end=min(start + _PART_BYTES, size)))

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise NotFound(f"{what} is not in {self.where}") from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise PermissionDenied(
                f"{self.where} refuses {what}: {_first_line(error)}; see AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from None
        except exceptions.AlreadyExistsError:
            raise
        except exceptions.BaseError as error:
            if "NoSuchBucket" in str(error):  # of a request that lists; some servers make a bucket at its first object
                raise NotFound(f"{self.where} has no bucket") from None
            raise Unavailable(f"{self.where} does not answer for {what}: {_first_line(error)}") from None


class S3Store(Store):
    """Versions as objects `<root>/v<version>/<file>` of a bucket."""

    kind = "s3"

    def __init__(self, bucket: str, root: str, run: str, *, patience_seconds: float = 30.0) -> None:
        super().__init__(run)
        self._bucket = Bucket(bucket, root, patience_seconds=patience_seconds)

    @property
    def where(self) -> str:
        return self._bucket.where

    def offer(self, version: int, delta: bool) -> S3Offer:
        bucket = self._bucket
        return S3Offer(bucket.bucket, bucket.key(f"v{version}"), bucket.endpoint, delta)

    def delete(self, version: int) -> None:
        with suppress(NotFound):  # without a bucket there are none
            self._bucket.remove([f"v{version}/{MANIFEST}"])
            self._bucket.remove(self._bucket.names(f"v{version}"))

    def _size(self, version: int, name: str) -> int | None:
        return self._bucket.size(f"v{version}/{name}")

    def _checksum(self, version: int, info: FileInfo) -> str | None:
        size = self._size(version, info.name)
        if size is None or size != info.size_bytes:
            return None if size is None else f"of {size} bytes"
        digest = xxhash.xxh3_128()
        for part in self._bucket.parts(f"v{version}/{info.name}"):
            digest.update(part)
        return digest.hexdigest()

    def _write(self, version: int, info: FileInfo, source: Path) -> None:
        self._bucket.upload(f"v{version}/{info.name}", source)

    def _create(self, version: int, content: bytes) -> bool:
        return self._bucket.create(f"v{version}/{MANIFEST}", content)

    def _read_manifest(self, version: int) -> bytes | None:
        return self._bucket.read(f"v{version}/{MANIFEST}")

    def _fetch(self, offer: Offer, name: str, target: Path) -> None:
        assert isinstance(offer, S3Offer)
        version = offer.prefix.rpartition("/")[2]
        self._bucket.download(f"{version}/{name}", target)


def _write_at(handle: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done:], start + done)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
