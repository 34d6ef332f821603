"""Variables of a user's shell or pod that libraries below read: proxies, launchers, service links, TMPDIR."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer
from pydantic_settings import SettingsConfigDict

from trinity.runtime import process, rpc
from trinity.runtime.errors import InvalidInput
from trinity.runtime.settings import ServiceSettings, load_settings

pytestmark = pytest.mark.core
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy")


@pytest.fixture
def address() -> str:
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """A proxy that the whole shell uses; it answers nobody, and shows whether anybody came."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in PROXIES:
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "")
        proxy.setblocking(False)
        yield proxy


def test_a_thread_reaches_a_service_past_the_proxy(address: str, proxied: socket.socket) -> None:
    with rpc.blocking_channel(address, identity=None) as channel:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    with pytest.raises(BlockingIOError):
        proxied.accept()


async def test_a_loop_reaches_a_service_past_the_proxy(address: str, proxied: socket.socket) -> None:
    async with rpc.channel(address, identity=None) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    with pytest.raises(BlockingIOError):
        proxied.accept()


def test_children_get_no_variable_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
    more = ("TORCHELASTIC_RUN_ID", "PET_NNODES", "GROUP_RANK", "ROLE_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE")
    of_accelerate = ("ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    for name in (*given, *more, *of_accelerate, "RANKING"):
        monkeypatch.setenv(name, "3")
    assert {"RANKING"} == {"RANKING", *given, *more, *of_accelerate} & process.inherited().keys()


def test_a_long_folder_of_temporary_files_has_a_short_name_in_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    environment = process.inherited()
    try:
        assert len(environment["TMPDIR"]) < 64
        assert process.inherited()["TMPDIR"] == environment["TMPDIR"]
        code = "import socket, tempfile; socket.socket(socket.AF_UNIX).bind(tempfile.gettempdir() + '/' + 's' * 40)"
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=30)
        assert (long / ("s" * 40)).exists()
    finally:
        os.unlink(environment["TMPDIR"])


def test_a_folder_that_no_link_can_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("y" * 90)))

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "symlink", refuse)
    with pytest.raises(InvalidInput, match=r"TMPDIR.*set a shorter one"):
        process.inherited()


class Buffer(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="TRINITY_BUFFER_", extra="forbid", frozen=True)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SERVICE_HOST", "10.96.0.7"),
        ("SERVICE_PORT", "7001"),
        ("SERVICE_PORT_METRICS", "9001"),
        ("PORT", "tcp://10.96.0.7:7001"),
        ("PORT_7001_TCP", "tcp://10.96.0.7:7001"),
        ("PORT_7001_TCP_ADDR", "10.96.0.7"),
        ("HEADLESS_SERVICE_HOST", "None"),
    ],
)
def test_service_links_of_kubernetes_are_no_settings(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"TRINITY_BUFFER_{variable}", value)
    assert load_settings(Buffer) == Buffer()


def test_a_port_that_is_no_link_is_a_misspelt_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_BUFFER_PORT", "7001")
    with pytest.raises(InvalidInput, match="TRINITY_BUFFER_PORT: is no setting"):
        load_settings(Buffer)
