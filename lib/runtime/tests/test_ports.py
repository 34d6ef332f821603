"""Ports for services: free, different, and out of reach of outgoing connections."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trinity.runtime.process import _ports, free_port

pytestmark = pytest.mark.core


def test_ports_are_different_free_and_none_that_a_connection_may_take() -> None:
    ports = [free_port() for _ in range(300)]
    assert len(set(ports)) == 300
    assert set(ports) <= set(_ports())
    for port in ports[:20]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("outgoing", "expected"),
    [
        ("32768\t60999\n", range(10_000, 32_768)),
        ("15000 65535", range(10_000, 15_000)),
        ("1024 60999", range(61_000, 65_536)),
        ("1024 65535", range(10_000, 65_536)),
        ("?", range(10_000, 32_768)),
    ],
)
def test_ports_of_outgoing_connections_are_left_to_them(tmp_path: Path, outgoing: str, expected: range) -> None:
    path = tmp_path / "ip_local_port_range"
    path.write_text(outgoing)
    assert _ports(path) == expected


def test_a_taken_port_is_named_with_its_setting(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        taken = f"127.0.0.1:{holder.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "trinity.environment.main", "serve"],
            env={**os.environ, "TRINITY_ENVIRONMENT_METRICS_LISTEN": taken},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert f"metrics_listen: {taken} cannot be listened on: Address already in use" in done.stderr


@pytest.mark.parametrize("host", ["nosuchhost.invalid", "::1", "192.0.2.1"])
def test_a_host_of_another_machine_is_refused_at_once(host: str) -> None:
    """Each of a thousand ports was tried, with a question to the name server."""
    with pytest.raises(OSError, match=r"not known|not supported|resolution|annot assign"):
        free_port(host)
