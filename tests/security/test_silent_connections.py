"""Connections that never say what they want cost a service no more than file descriptors, for seconds (slowloris)."""

import contextlib
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.servers.service import ServiceProcess
from trinity.runtime import rpc

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(300)]

CONNECTIONS = 1500
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # empty: the connection is set up
HALF_A_CALL = bytes([0, 0, 1, 1, 0, 0, 0, 0, 1, 0x83])  # HEADERS that never end: `:method: POST`
PING, PING_ANSWER = bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]), bytes([0, 0, 8, 6, 1, 0, 0, 0, 0])
ROOT = Path(__file__).parents[2]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    """A service that a shell with the usual limit of open files starts."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 4 * CONNECTIONS:
        pytest.skip(f"this system allows only {most} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, most))
    started = ServiceProcess("environment", tmp_path)
    try:
        started.start()
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        yield started
    finally:
        started.kill()
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def answer_pings(connections: list[socket.socket]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            heard = connection.recv(65536, socket.MSG_DONTWAIT)
            if (at := heard.find(PING)) >= 0:
                connection.sendall(PING_ANSWER + heard[at + 9 : at + 17])


@pytest.mark.parametrize(
    ("said", "answers"),
    [
        (b"", False),
        (PREFACE[:10], False),
        (PREFACE, False),
        (PREFACE + SETTINGS, False),
        (PREFACE + SETTINGS, True),
        (PREFACE + SETTINGS + HALF_A_CALL, False),
    ],
    ids=["nothing", "half a preface", "the preface", "settings", "settings and pings", "half a call"],
)
def test_a_service_answers_beside_silent_connections_and_ends_them(
    service: ServiceProcess, said: bytes, answers: bool
) -> None:
    host, port = service.address.split(":")
    process, opened = psutil.Process(service.pid), []
    try:
        for _ in range(CONNECTIONS):
            opened.append(socket.create_connection((host, int(port)), timeout=5))
            opened[-1].sendall(said)
        service.wait_serving(10)
        deadline = time.monotonic() + 120
        while process.num_fds() > 100:
            assert time.monotonic() < deadline, f"{process.num_fds()} file descriptors are open"
            if answers:
                answer_pings(opened)
            time.sleep(0.5)
        service.wait_serving(10)
    finally:
        for connection in opened:
            connection.close()


def test_every_port_of_a_service_has_the_same_limits() -> None:
    sources = [
        path for folder in ("lib", "services", "cli", "satellites") for path in ROOT.glob(f"{folder}/**/src/**/*.py")
    ]
    assert len(sources) > 300
    makes = [path.name for path in sources if "aio.server(" in path.read_text()]
    assert makes == ["host.py"]
    assert dict(rpc.SERVER_OPTIONS)["grpc.max_connection_idle_ms"] <= 60_000
