"""S3-compatible object storage, through obstore. Endpoint and credentials come from the usual AWS_* variables."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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


class S3Store(Store):
    """Objects `<root>/v<version>/<file>` of a bucket, in parts that travel side by side.

    `patience_seconds` bounds one request, and all its retries. An interrupted upload leaves parts, which the bucket's
    lifecycle rule for incomplete uploads has to remove.
    """

    kind = "s3"

    def __init__(self, bucket: str, root: str, run: str, *, patience_seconds: float = 30.0) -> None:
        super().__init__(run)
        self._bucket = bucket
        self._root = root
        self._endpoint = endpoint_of_environment()
        plain = self._endpoint.startswith("http://")
        patience = timedelta(seconds=patience_seconds)
        config = {"endpoint": self._endpoint} if self._endpoint else {}
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
        return "/".join(part for part in (f"s3://{self._bucket}", self._root) if part)

    def offer(self, version: int, delta: bool) -> S3Offer:
        return S3Offer(self._bucket, self._prefix(version), self._endpoint, delta)

    def delete(self, version: int) -> None:
        with self._translated(f"v{version}"):
            obstore.delete(self._objects, self._key(version, MANIFEST))
            for page in obstore.list(self._objects, self._prefix(version) + "/"):
                obstore.delete(self._objects, [entry["path"] for entry in page])

    def _prefix(self, version: int) -> str:
        return "/".join(part for part in (self._root, f"v{version}") if part)

    def _key(self, version: int, name: str) -> str:
        return f"{self._prefix(version)}/{name}"

    def _size(self, version: int, name: str) -> int | None:
        try:
            with self._translated(name):
                return obstore.head(self._objects, self._key(version, name))["size"]
        except NotFound:
            return None

    def _checksum(self, version: int, info: FileInfo) -> str | None:
        size = self._size(version, info.name)
        if size is None or size != info.size_bytes:
            return None if size is None else f"of {size} bytes"
        digest = xxhash.xxh3_128()
        with self._translated(info.name):
            for start in range(0, size, _PART_BYTES):
                digest.update(self._range(self._key(version, info.name), start, size))
        return digest.hexdigest()

    def _write(self, version: int, info: FileInfo, source: Path) -> None:
        part = max(_PART_BYTES, -(-info.size_bytes // _MOST_PARTS))
        with self._translated(info.name):
            obstore.put(
                self._objects, self._key(version, info.name), source, chunk_size=part, max_concurrency=_CONCURRENCY
            )

    def _create(self, version: int, content: bytes) -> bool:
        try:
            with self._translated(MANIFEST):
                obstore.put(self._objects, self._key(version, MANIFEST), content, mode="create")
        except exceptions.AlreadyExistsError:
            return False
        return True

    def _read_manifest(self, version: int) -> bytes | None:
        try:
            with self._translated(MANIFEST):
                return bytes(obstore.get(self._objects, self._key(version, MANIFEST)).bytes())
        except NotFound:
            return None

    def _fetch(self, offer: Offer, name: str, target: Path) -> None:
        assert isinstance(offer, S3Offer)
        key = f"{offer.prefix}/{name}"
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            with self._translated(f"{offer.prefix}/{name}"):
                size = obstore.head(self._objects, key)["size"]
                with ThreadPoolExecutor(_CONCURRENCY) as pool:
                    parts = range(0, size, _PART_BYTES)
                    for _ in pool.map(lambda start: _write_at(handle, self._range(key, start, size), start), parts):
                        pass
        finally:
            os.close(handle)

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
            raise Unavailable(f"{self.where} does not answer for {what}: {_first_line(error)}") from None


def _write_at(handle: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done:], start + done)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
