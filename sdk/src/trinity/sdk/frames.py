"""Messages over a pipe between a process and its worker: four bytes of length, big endian, then the content."""

import socket
import struct

_LENGTH = struct.Struct(">I")


def frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def read_frame(pipe: socket.socket) -> bytes | None:
    """Returns the next message; None when the other side is gone."""
    head = _exactly(pipe, _LENGTH.size)
    return _exactly(pipe, _LENGTH.unpack(head)[0]) if head is not None else None


def _exactly(pipe: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = pipe.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
