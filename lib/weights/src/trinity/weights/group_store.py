"""The store in which trainer and members of a collective group meet; the trainer serves it. Needs torch.

torch's TCPStore lets every process that reaches its port list, set and delete keys, so a prefix of keys protects
nothing. Here each side first proves that it knows the epoch's secret, which the trainer makes and the sync service
gives only to the members: HMAC-SHA256 over random bytes of both. Later messages are neither signed nor encrypted.
"""

import contextlib
import hmac
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, BinaryIO

import torch.distributed as dist

from trinity.runtime.errors import TrinityError
from trinity.runtime.settings import LOOPBACK

_POLL_SECONDS = 0.005
_HANDSHAKE_SECONDS = 10.0
_YES, _NO = b"yes", b"no"
_SET, _GET, _ADD = b"s", b"g", b"a"
_PROOF_BYTES = 32
_HEAD = struct.Struct(">cII")  # operation, bytes of the key, bytes of the value
_ANSWER = struct.Struct(">?I")  # whether the key has a value, and its bytes
_MAX_BYTES = 2**20


class GroupBroken(TrinityError):
    """A member of the group is gone, hangs or refuses; the epoch has ended."""


class Store:
    """One side of the store, with deadlines and without blocking reads. `secret` is hexadecimal."""

    def __init__(self, client: "_Client", address: str, secret: str, server: "_Server | None" = None) -> None:
        self._client, self._server = client, server
        self.address, self.secret = address, secret

    @classmethod
    def serve(cls, host: str) -> "Store":
        """Listens on a free port: on the loopback for a loopback host, for any other name on all interfaces."""
        secret = secrets.token_hex(32)
        server = _Server(("127.0.0.1" if host in LOOPBACK else "", 0), bytes.fromhex(secret))
        threading.Thread(target=server.serve_forever, daemon=True, name="group-store").start()
        port = server.server_address[1]
        return cls(_Client("127.0.0.1", port, secret, _HANDSHAKE_SECONDS), f"{host}:{port}", secret, server)

    @classmethod
    def connect(cls, address: str, secret: str, timeout_seconds: float) -> "Store":
        """Raises GroupBroken if no process serves the store, or the server does not know the secret."""
        host, _, port = address.rpartition(":")
        try:
            return cls(_Client(host.strip("[]"), int(port), secret, timeout_seconds), address, secret)
        except (OSError, RuntimeError, ValueError) as error:
            raise GroupBroken(f"the trainer's store at {address} does not answer: {error}") from None

    def prefixed(self, prefix: str) -> Any:
        """Returns torch's store for a process group. The group keeps no reference, so this object must outlive it."""
        return dist.PrefixStore(prefix, self._client)

    def say(self, key: str, yes: bool = True) -> None:
        with _broken_store():
            self._client.set(key, _YES if yes else _NO)

    def heard(self, key: str) -> bool | None:
        """Returns the value of a key; None while it is not set."""
        with _broken_store():
            value = self._client.find(key)
        return None if value is None else value == _YES

    def wait(self, key: str, timeout_seconds: float) -> bool:
        """Returns True if the answer "yes" came in time."""
        return self.wait_all([key], timeout_seconds)[0] is True

    def wait_all(self, keys: Sequence[str], timeout_seconds: float) -> list[bool | None]:
        """Returns the answer under each key, early when all are yes or one is no."""
        end = time.monotonic() + timeout_seconds
        while True:
            heard = [self.heard(key) for key in keys]
            if all(heard) or False in heard or time.monotonic() >= end:
                return heard
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Ends the connection and, on the trainer's side, the server."""
        self._client.close()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


@contextlib.contextmanager
def _broken_store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed.DistError is one
        raise GroupBroken(f"the trainer's store is gone: {error}") from None


class _Server(socketserver.ThreadingTCPServer):
    """Runs a thread for each connection. Serves clients that prove that they know the secret."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self.secret = secret
        self._values: dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        super().__init__(address, _Connection)

    def answer(self, operation: bytes, key: bytes, value: bytes) -> bytes | None:
        with self._lock:
            if operation == _SET:
                self._values[key] = value
            elif operation == _ADD:
                self._values[key] = b"%d" % (int(self._values.get(key, b"0")) + int(value))
            return self._values.get(key)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores connections that break or speak another protocol; they are closed."""


class _Connection(socketserver.StreamRequestHandler):
    server: _Server
    timeout = _HANDSHAKE_SECONDS

    def handle(self) -> None:
        ours = secrets.token_bytes(_PROOF_BYTES)
        self.wfile.write(ours)
        theirs, proof = _read(self.rfile, _PROOF_BYTES), _read(self.rfile, _PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(self.server.secret, b"member", ours, theirs)):
            return
        self.wfile.write(_proof(self.server.secret, b"trainer", ours, theirs))
        self.connection.settimeout(None)
        while True:
            operation, key_bytes, value_bytes = _HEAD.unpack(_read(self.rfile, _HEAD.size))
            if key_bytes + value_bytes > _MAX_BYTES:
                return
            value = self.server.answer(operation, _read(self.rfile, key_bytes), _read(self.rfile, value_bytes))
            self.wfile.write(_ANSWER.pack(value is not None, len(value or b"")) + (value or b""))


class _Client(dist.Store):
    """The part of torch's store that gloo and NCCL use. Raises torch's DistError."""

    def __init__(self, host: str, port: int, secret: str, timeout_seconds: float) -> None:
        super().__init__()
        self._seconds = timeout_seconds
        self._lock = threading.Lock()
        self._socket = socket.create_connection((host, port), timeout_seconds)
        self._file = self._socket.makefile("rb")
        try:
            key, ours = bytes.fromhex(secret), secrets.token_bytes(_PROOF_BYTES)
            theirs = _read(self._file, _PROOF_BYTES)
            self._socket.sendall(ours + _proof(key, b"member", theirs, ours))
            if not hmac.compare_digest(_read(self._file, _PROOF_BYTES), _proof(key, b"trainer", theirs, ours)):
                raise dist.DistNetworkError("it does not know the epoch's secret")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a thread may read from it
        self._socket.close()

    def find(self, key: str) -> bytes | None:
        return self._ask(_GET, key)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(_SET, key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._ask(_GET, key) or b""

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(_ADD, key, b"%d" % amount) or b"0")

    def check(self, keys: list[str]) -> bool:
        return all(self.find(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        end = time.monotonic() + (timeout.total_seconds() if timeout is not None else self._seconds)
        while not self.check(keys):
            if time.monotonic() >= end:
                raise dist.DistStoreError(f"no value of {', '.join(keys)} in time")
            time.sleep(_POLL_SECONDS)

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def clone(self) -> dist.Store:
        """Returns itself: one connection serves all threads."""
        return self

    def _ask(self, operation: bytes, key: str, value: bytes = b"") -> bytes | None:
        name = key.encode()
        try:
            with self._lock:
                self._socket.sendall(_HEAD.pack(operation, len(name), len(value)) + name + value)
                known, size = _ANSWER.unpack(_read(self._file, _ANSWER.size))
                answer = _read(self._file, size)
        except (OSError, ValueError) as error:
            self.close()  # a late answer would be taken for the next one
            raise dist.DistNetworkError(str(error)) from None
        return answer if known else None


def _proof(secret: bytes, side: bytes, servers: bytes, clients: bytes) -> bytes:
    return hmac.digest(secret, side + servers + clients, "sha256")


def _read(file: "BinaryIO | Any", size: int) -> bytes:
    found: bytes = file.read(size)
    if len(found) < size:
        raise ConnectionError("the connection was closed")
    return found
