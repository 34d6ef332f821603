"""Scans ports without an identity, and finds the ports that another network reaches.

    found = await scan(ports_of({"trinity": run.pid, "buffer": buffer.pid}), {7001: Kind.GRPC})

Each port gets the first bytes of a NATS client without a user, an HTTP request, a TLS handshake without a certificate,
and a gRPC call without an identity.
"""

import asyncio
import ipaddress
import json
import random
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

import grpc
import grpc.aio
import psutil

from support.checks.listeners import listeners
from trinity.runtime import rpc

_SILENT_SECONDS = 3.0  # what says nothing for so long, and does not close the connection, is silent
_SPEAK_SECONDS = 60.0  # unless it is known to speak: the machine may be busy
_REACH_SECONDS = 20.0
# The rest is more than a proof for the group's store. No first eight bytes are a number that gloo waits for.
_NATS = b'CONNECT {"verbose":false}\r\nPING\r\n' + b"\xff" * 100
_HTTP = b"GET /metrics HTTP/1.0\r\n\r\n"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_CONTROL_FRAMES = {4, 6, 7, 8}  # SETTINGS, PING, GOAWAY, WINDOW_UPDATE: nothing of a call (RFC 9113)
_NATS_REFUSES = re.compile(rb"INFO \{[^\r\n]*\} ?\r\n(-ERR '[^\r\n]*'\r\n)*")  # it greets before it knows anything
_CHALLENGE_BYTES = 32


class Kind(StrEnum):
    """Kinds of answers. All but HTTP and OPEN are refusals."""

    GRPC = "gRPC that wants a token"
    TLS = "TLS that wants a certificate"
    NATS = "NATS that wants a user"
    STORE = "a challenge, then silence"
    SILENT = "silence"
    GONE = "it is closed"
    HTTP = "HTTP"
    OPEN = "an answer that is no refusal"


@dataclass(frozen=True, order=True)
class Port:
    """A TCP socket that a process listens on. `owner`: the nearest process that has a name."""

    owner: str
    host: str
    port: int

    @property
    def is_local(self) -> bool:
        address = ipaddress.ip_address(self.host)
        inner = getattr(address, "ipv4_mapped", None) or address
        return inner.is_loopback


@dataclass(frozen=True)
class Answers:
    """Answers: of NATS, over HTTP, within TLS (None without a handshake), and the code of a gRPC call."""

    nats: bytes
    http: bytes
    secured: bytes | None
    called: grpc.StatusCode

    @property
    def kind(self) -> Kind:
        said = self.nats, self.http
        if self.http.startswith(b"HTTP/1."):
            return Kind.HTTP
        if self.called is grpc.StatusCode.UNAUTHENTICATED and not self.secured and all(map(_is_control, said)):
            return Kind.GRPC
        if self.secured or self.called is not grpc.StatusCode.UNAVAILABLE:
            return Kind.OPEN
        if not any(said):
            return Kind.SILENT if self.secured is None else Kind.TLS
        if all(map(_NATS_REFUSES.fullmatch, said)):
            return Kind.NATS
        return Kind.STORE if {len(one) for one in said} <= {0, _CHALLENGE_BYTES} else Kind.OPEN


def _is_control(data: bytes) -> bool:
    """Returns True if all HTTP/2 frames belong to the connection, none to a call."""
    while data:
        if len(data) < 9 or data[3] not in _CONTROL_FRAMES:
            return False
        data = data[9 + int.from_bytes(data[:3], "big") :]
    return True


def ports_of(roots: Mapping[str, int]) -> list[Port]:
    """Ports of processes and their descendants, by name. The last name of a process counts."""
    owners: dict[int, str] = {}
    for name, pid in roots.items():
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            owners |= {one.pid: name for one in [root, *root.children(recursive=True)]}
    return sorted({Port(name, host, port) for pid, name in owners.items() for host, port in listeners(pid)})


async def scan(ports: Iterable[Port], known: Mapping[int, Kind], host: str = "127.0.0.1") -> dict[Port, Kind]:
    """Answer of each port, from this machine. `known` has expected kinds, whose answers are awaited."""
    found = list(ports)
    kinds = await asyncio.gather(*(_kind((host, one.port), known.get(one.port, Kind.SILENT)) for one in found))
    return dict(zip(found, kinds, strict=True))


async def _kind(port: tuple[str, int], known: Kind) -> Kind:
    seconds = _SILENT_SECONDS if known is Kind.SILENT else _SPEAK_SECONDS
    in_tls = _SPEAK_SECONDS if known is Kind.TLS else _SILENT_SECONDS
    try:
        nats, http, secured = await asyncio.gather(
            _said(port, _NATS, seconds), _said(port, _HTTP, seconds), _said_in_tls(port, in_tls)
        )
    except ConnectionRefusedError:
        return Kind.GONE
    spoke = nats or http or secured is not None  # gRPC speaks first, or within TLS
    return Answers(nats, http, secured, await _called(port) if spoke else grpc.StatusCode.UNAVAILABLE).kind


async def _said(port: tuple[str, int], sent: bytes, seconds: float, tls: ssl.SSLContext | None = None) -> bytes:
    """All that comes until the connection is closed, or silent for so long. ConnectionRefusedError."""
    reader, writer = await asyncio.open_connection(*port, ssl=tls)
    said = b""
    try:
        writer.write(sent)
        with suppress(TimeoutError, OSError):
            while more := await asyncio.wait_for(reader.read(65536), seconds):
                said += more
    finally:
        writer.transport.abort()
    return said


async def _said_in_tls(port: tuple[str, int], seconds: float) -> bytes | None:
    """The same from within TLS; None where no handshake succeeds. One without a certificate is refused after it."""
    anyone = ssl.create_default_context()
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    anyone.set_alpn_protocols(["h2"])
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(2 * seconds):
            return await _said(port, _PREFACE, seconds, anyone)
    return None


async def _called(port: tuple[str, int]) -> grpc.StatusCode:
    async with rpc.channel(f"{port[0]}:{port[1]}", identity=None) as channel:
        return await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=_SPEAK_SECONDS).code()


# Runs in a separate network, behind a cable to this one. Once the first port answers, the cable is connected.
_ELSEWHERE = """
import json, socket, subprocess, sys, time
print("ready", flush=True)
device, own, there, seconds, ports = json.loads(sys.stdin.readline())
subprocess.run(["ip", "addr", "add", own, "dev", device], check=True)
subprocess.run(["ip", "link", "set", device, "up"], check=True)
def answers(port):
    try:
        socket.create_connection((there, port), 2).close()
    except OSError:
        return False
    return True
end = time.monotonic() + seconds
while not answers(ports[0]) and time.monotonic() < end:
    time.sleep(0.05)
print(json.dumps([port for port in ports if answers(port)]))
"""


def reached_from_another_network(ports: Iterable[int]) -> set[int] | None:
    """Ports that answer a connection from another network namespace. None if this user may make none, or a firewall
    keeps it from a port that is open."""
    number = random.randrange(2**15)
    subnet = ipaddress.IPv4Address("198.18.0.0") + 4 * number  # for tests of networks (RFC 2544)
    here, there = str(subnet + 1), f"{subnet + 2}/30"
    near, far = f"near{number}", f"far{number}"
    with subprocess.Popen(
        ["unshare", "--net", sys.executable, "-c", _ELSEWHERE],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as child, socket.socket() as control:  # fmt: skip
        try:
            assert child.stdout is not None
            if not child.stdout.readline():
                return None
            _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", str(child.pid))
            _ip("addr", "add", f"{here}/30", "dev", near)
            _ip("link", "set", near, "up")
            control.bind((here, 0))
            control.listen()
            open_port = control.getsockname()[1]
            given = [far, there, here, _REACH_SECONDS, [open_port, *ports]]
            found = set(json.loads(child.communicate(json.dumps(given) + "\n", timeout=5 * _REACH_SECONDS)[0]))
        except (OSError, subprocess.CalledProcessError):
            return None
        finally:
            child.kill()  # and with it the namespace and the cable
    return found - {open_port} if open_port in found else None


def _ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True, timeout=_REACH_SECONDS)
