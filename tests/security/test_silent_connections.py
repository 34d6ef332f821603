"""Connections that never say what they want cost a service no more than file descriptors, for seconds (slowloris)."""

import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.servers.service import ServiceProcess

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(300)]

CONNECTIONS = 1500
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


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


@pytest.mark.parametrize("said", [b"", PREFACE[:10]])
def test_a_service_answers_beside_silent_connections_and_ends_them(service: ServiceProcess, said: bytes) -> None:
    host, port = service.address.split(":")
    process, opened = psutil.Process(service.pid), []
    try:
        for _ in range(CONNECTIONS):
            opened.append(socket.create_connection((host, int(port)), timeout=5))
            opened[-1].sendall(said)
        service.wait_serving(10)
        deadline = time.monotonic() + 60
        while process.num_fds() > 100:
            assert time.monotonic() < deadline, f"{process.num_fds()} file descriptors are open"
            time.sleep(0.5)
        service.wait_serving(10)
    finally:
        for connection in opened:
            connection.close()
