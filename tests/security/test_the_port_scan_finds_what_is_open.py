"""support/checks/port_scan.py tells refusals from answers, and finds what other networks reach."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from support.checks.port_scan import Kind, Port, ports_of, reached_from_another_network, scan
from support.servers.certificates import identity_of, make_certificates
from support.servers.nats import NatsServer
from trinity.runtime import metrics, rpc
from trinity.runtime.trust.gate import Gate
from trinity.runtime.trust.tls import server_credentials
from trinity.runtime.trust.tokens import KnownTokens, make_tokens
from trinity.weights.collective import Store

pytestmark = pytest.mark.core

EXPECTED = {
    "tokens": Kind.GRPC,
    "certificates": Kind.TLS,
    "open": Kind.OPEN,
    "TLS alone": Kind.OPEN,
    "NATS": Kind.NATS,
    "open NATS": Kind.OPEN,
    "metrics": Kind.HTTP,
    "store": Kind.STORE,
    "echo": Kind.OPEN,
    "silent": Kind.SILENT,
    "closed": Kind.GONE,
}


async def served(gate: Gate | None, credentials: grpc.ServerCredentials | None = None) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(interceptors=[rpc.Edge(gate)])
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    add = server.add_insecure_port if credentials is None else server.add_secure_port
    port = add("127.0.0.1:0", *(() if credentials is None else (credentials,)))
    await server.start()
    return server, port


@pytest.fixture
async def kinds(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[dict[str, Kind]]:
    make_tokens(tmp_path / "identity")
    certificates = make_certificates(tmp_path / "certificates")
    own = identity_of(certificates, "sync").tls
    assert own is not None
    key, certificate = (certificates / "sync" / name for name in ("tls.key", "tls.crt"))
    without_clients = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    servers = {
        "tokens": await served(Gate(KnownTokens(tmp_path / "identity"))),
        "certificates": await served(Gate(None), server_credentials(own)),
        "open": await served(None),
        "TLS alone": await served(None, without_clients),
    }
    open_nats = NatsServer(tmp_path / "open")
    open_nats.start()
    echo = await asyncio.start_server(_echo, "127.0.0.1", 0)
    silent = socket.create_server(("127.0.0.1", 0))
    store = Store.serve("127.0.0.1")
    ports = {name: port for name, (_, port) in servers.items()} | {
        "NATS": nats_server.port,
        "open NATS": open_nats.port,
        "metrics": metrics.serve("127.0.0.1", 0, None, ""),
        "store": int(store.address.rpartition(":")[2]),
        "echo": echo.sockets[0].getsockname()[1],
        "silent": silent.getsockname()[1],
        "closed": 1,
    }
    known = {port: EXPECTED[name] for name, port in ports.items()}
    found = await scan((Port(name, "127.0.0.1", port) for name, port in ports.items()), known)
    yield {port.owner: kind for port, kind in found.items()}
    for server, _ in servers.values():
        await server.stop(grace=0)
    open_nats.stop()
    echo.close()
    silent.close()
    store.close()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.read(1000))
    writer.close()


async def test_refusals_are_told_from_answers(kinds: dict[str, Kind]) -> None:
    assert kinds == EXPECTED


async def test_what_listens_beyond_the_loopback_is_found() -> None:
    with socket.create_server(("0.0.0.0", 0)) as wide, socket.create_server(("127.0.0.1", 0)) as narrow:
        ports = {one.getsockname()[1]: one for one in (wide, narrow)}
        found = {port.port: port for port in ports_of({"this": os.getpid()}) if port.port in ports}
        assert [found[port].is_local for port in ports] == [False, True]
        assert {port.owner for port in found.values()} == {"this"}
        reached = await asyncio.to_thread(reached_from_another_network, list(ports))
        if reached is None:
            pytest.skip("no other network can be made here")
        assert reached == {wide.getsockname()[1]}


def test_an_address_of_ipv4_in_ipv6_is_local() -> None:
    assert Port("gRPC", "::ffff:127.0.0.1", 1).is_local and Port("", "::1", 1).is_local
    assert not any(Port("", host, 1).is_local for host in ("::", "0.0.0.0", "::ffff:10.0.0.1", "10.0.0.1"))
