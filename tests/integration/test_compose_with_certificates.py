"""The services of deploy/compose/compose.yaml as processes: mTLS, TLS and users of NATS, calls of the operator.

Their environment is that of the file. Only what a container would give them is replaced: host names, ports, mounts.
"""

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml

from support.checks.port_scan import Kind, ports_of, scan
from support.fakes import peers
from support.fakes.peers import FakeTrainer
from support.servers.buffer_run import BufferRun
from support.servers.certificates import identity_of, tls_settings
from support.servers.nats import ComposedNats, NatsServer
from support.servers.service import ServiceProcess
from trinity.cluster.certs import certs
from trinity.runtime import rpc
from trinity.runtime.broker import connect
from trinity.runtime.errors import Unauthenticated, Unavailable
from trinity.runtime.process import environment, free_port

pytestmark = pytest.mark.extended

SERVICES = ("sync", "environment", "buffer")
PORTS = {"environment": 7002, "sync": 7004, "trainer": 7005}
STEPS = 2
HEALTH = "/grpc.health.v1.Health/Check"


class Composed:
    """NATS, sync, buffer and environment."""

    def __init__(self, repository: Path, folder: Path) -> None:
        self.identity = folder / "identity"
        self.run = BufferRun(folder, NatsServer(folder / "unused"), steps=STEPS, groups=2)  # for its YAML
        certs.init(self.identity, config=self.run.config_file)
        self.nats = ComposedNats(repository, folder / "nats", self.identity)
        composed = yaml.safe_load((repository / "deploy/compose/compose.yaml").read_text())["services"]
        self.services: dict[str, ServiceProcess] = {}
        for name in SERVICES:
            self.services[name] = self._service(folder, name, composed[name]["environment"])

    def _service(self, folder: Path, name: str, given: dict[str, str]) -> ServiceProcess:
        places = {
            "/identity": str(self.identity / name),
            "/run/trinity.yaml": str(self.run.config_file),
            "nats://nats:4222": self.nats.url,
            "${TRINITY_STAGE:-}": "",
        }
        for other, port in PORTS.items():
            known = self.services.get(other)
            places[f"${{TRINITY_HOST:-127.0.0.1}}:{port}"] = known.address if known else f"127.0.0.1:{free_port()}"
        settings = {}
        for variable, value in given.items():
            key = variable.removeprefix(f"TRINITY_{name.upper()}_")
            if key not in ("LISTEN", "METRICS_LISTEN", "ADVERTISE"):
                settings[key] = next((value.replace(a, b) for a, b in places.items() if a in value), value)
        limits = {"LOG_GIB": "0.5", "LOG_KEEP_GIB": "0"} if name == "buffer" else {}
        return ServiceProcess(name, folder, **settings, **limits)

    def start(self) -> None:
        self.nats.start()
        for service in self.services.values():
            service.start()

    def stop(self) -> None:
        for service in self.services.values():
            service.kill()
        self.nats.kill()

    def trainer(self) -> FakeTrainer:
        addresses = self.services["buffer"].address, self.services["sync"].address
        return FakeTrainer(self.run.run, *addresses, identity_of(self.identity, "trainer"))


@pytest.fixture(scope="module")
def composed(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    made = Composed(repository, tmp_path_factory.mktemp("composed"))
    made.start()
    yield made
    made.stop()


def files_of_nats(composed: Composed, name: str) -> dict[str, Path]:
    return {"creds": composed.identity / name / "nats.creds", "ca": composed.identity / name / "ca.crt"}


@pytest.mark.timeout(300)
async def test_steps_are_learnt_and_the_operator_is_answered(composed: Composed, tmp_path: Path) -> None:
    trainer = composed.trainer()
    await trainer.begin()
    accounts, ca = composed.identity / "ca/nats/account.seed", composed.identity / "explorer/ca.crt"
    with environment({"TRINITY_NATS_CREDS": str(accounts), "TRINITY_NATS_CA": str(ca)}):  # peers issue their own user
        async with peers.explorer(composed.nats.url, composed.run.run):
            for step in range(1, STEPS + 1):
                assert await trainer.batch(step)
                await trainer.publish(step, tmp_path / str(step))
    await trainer.close()
    versions = json.loads(await asyncio.to_thread(_trinity, composed, "weights", "list", "--json"))
    assert [one["version"] for one in versions] == [2, 1, 0]
    named = ("--run", composed.run.folder.name)
    assert json.loads(await asyncio.to_thread(_trinity, composed, "deadletters", "list", "--json", *named)) == []
    batch = json.loads(await asyncio.to_thread(_trinity, composed, "batch", "show", str(STEPS), "--json", *named))
    assert (batch["run"], len(batch["groups"])) == (composed.run.run, 2)
    status = json.loads(await asyncio.to_thread(_trinity, composed, "status", "--json"))
    health = {one["name"]: one["health"] for one in status["processes"]}
    assert health == {**dict.fromkeys(SERVICES, "SERVING"), "trainer": "UNAVAILABLE"}  # a stand-in: it serves nothing
    assert (status["run"], status["groups"]["stored"]) == (composed.run.run, 2 * STEPS)


def _trinity(composed: Composed, *command: str) -> str:
    """What the command line prints on a machine without job folders, as the user `operator`."""
    own = files_of_nats(composed, "operator")
    operator = {f"TRINITY_{key}": value for key, value in tls_settings(composed.identity, "operator").items()}
    operator |= {"TRINITY_NATS_CREDS": str(own["creds"]), "TRINITY_NATS_CA": str(own["ca"])}
    done = subprocess.run(
        [sys.executable, "-m", "trinity.cli.main", *command, "--nats", composed.nats.url],
        env={**os.environ, **operator}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def _pages(composed: Composed, repository: Path) -> dict[str, str]:
    """What `observe` of compose.yaml answers, with its command and the reader's identity alone."""
    service = yaml.safe_load((repository / "deploy/compose/compose.yaml").read_text())["services"]["observe"]
    given = {"nats://${TRINITY_HOST:-127.0.0.1}:4222": composed.nats.url, "7006": str(free_port())}
    command = [given.get(word, word) for word in service["command"]]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRINITY_")}
    arguments = {"env": kept | {"TRINITY_IDENTITY": str(composed.identity / "reader")}, "text": True}
    with subprocess.Popen(
        [sys.executable, "-m", "trinity.cli.main", *command], stdout=subprocess.PIPE, **arguments
    ) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout is not None
            address, _, key = process.stdout.readline().strip().partition("?key=")
            opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            first = opener.open(f"{address}?key={key}", timeout=60).read().decode()
            return {"": first} | {
                path: opener.open(f"{address}/{path}", timeout=60).read().decode()
                for path in ("versions", "fleet", "dead", "step/1")
            }
        finally:
            process.terminate()


@pytest.mark.timeout(300)
async def test_the_pages_are_answered_as_a_reader(composed: Composed, repository: Path) -> None:
    """After the steps above."""
    pages = await asyncio.to_thread(_pages, composed, repository)
    assert 'class="ledger sound"' in pages[""]
    assert "This cannot be shown" not in "".join(pages.values())
    assert "LIVE" in pages["versions"] and "SERVING" in pages["fleet"] and "Step 1" in pages["step/1"]


async def test_no_caller_without_an_identity_is_answered(composed: Composed) -> None:
    for service in composed.services.values():
        async with rpc.channel(service.address, identity=None) as channel:
            code = await channel.unary_unary(HEALTH)(b"", timeout=20).code()
        assert code is grpc.StatusCode.UNAVAILABLE
    ca = composed.identity / "reader/ca.crt"
    with pytest.raises(Unauthenticated):
        await connect(composed.nats.url, "stranger", ca=ca, wait_seconds=10)


async def test_ports_refuse_who_shows_nothing(composed: Composed) -> None:
    """All but the pages of metrics and of NATS' monitor (docs/security.md, "Other doors"); and there are no others."""
    known = {composed.nats.port: Kind.NATS, composed.nats.monitor: Kind.HTTP}
    for service in composed.services.values():
        started = next(event for event in service.events() if event["event"] == "service.started")
        known |= {_port(service.address): Kind.TLS, _port(str(started["metrics"])): Kind.HTTP}
    pids = {name: service.pid for name, service in composed.services.items()}
    found = await scan(ports_of({**pids, "nats": composed.nats.pid}), known)
    assert {port: kind for port, kind in found.items() if kind is not known.get(port.port)} == {}
    assert {port.port for port in found} == known.keys()


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


async def test_a_nats_server_of_another_authority_is_refused(composed: Composed, tmp_path: Path) -> None:
    certs.init(tmp_path / "other")
    creds = composed.identity / "reader/nats.creds"
    with pytest.raises(Unauthenticated, match="has a certificate that this process's authorities"):
        await connect(composed.nats.url, "reader", creds=creds, ca=tmp_path / "other/reader/ca.crt", wait_seconds=60)


@pytest.mark.timeout(120)
async def test_a_revoked_identity_is_out_of_nats_and_of_services(composed: Composed) -> None:
    certs.issue("explorer", "gpu-7", composed.identity, run=composed.run.run)
    lost, kept = (files_of_nats(composed, name) for name in ("gpu-7", "reader"))
    sync = rpc.channel(composed.services["sync"].address, identity=identity_of(composed.identity, "gpu-7"))
    async with await connect(composed.nats.url, "reader", **kept) as other:
        async with await connect(composed.nats.url, "gpu-7", **lost) as broker:
            assert await sync.unary_unary(HEALTH)(b"", timeout=20).code() is grpc.StatusCode.OK
            certs.revoke(["gpu-7"], composed.identity)
            assert await sync.unary_unary(HEALTH)(b"", timeout=20).code() is grpc.StatusCode.UNAUTHENTICATED
            composed.nats.read_files_again()
            async with asyncio.timeout(30):
                while broker.client.is_connected:
                    await asyncio.sleep(0.05)
        with pytest.raises(Unauthenticated):
            await connect(composed.nats.url, "gpu-7", **lost, wait_seconds=10)
        await other.request(other.js.account_info, "account", 20)
    certs.rotate(["gpu-7"], composed.identity)
    async with await connect(composed.nats.url, "gpu-7", **lost) as broker:
        await broker.request(broker.js.account_info, "account", 20)
    assert await sync.unary_unary(HEALTH)(b"", timeout=20).code() is grpc.StatusCode.OK
    await sync.close()


@pytest.mark.timeout(120)
async def test_nats_gets_another_certificate_while_clients_are_connected(composed: Composed) -> None:
    """Through a new authority too: a client that reconnects reads the bundle again."""
    async with await connect(composed.nats.url, "operator", **files_of_nats(composed, "operator")) as broker:
        certs.rotate(None, composed.identity, new_authority=True)
        certs.rotate(None, composed.identity)
        composed.nats.read_files_again()
        certs.rotate(None, composed.identity, drop_old=True)
        await _connected_with_new_certificate(composed)
        composed.nats.kill()
        composed.nats.start()
        await broker.request(broker.js.account_info, "account", 60)


async def _connected_with_new_certificate(composed: Composed) -> None:
    """Until the server has read it: with the newest authority alone a new connection succeeds."""
    own = files_of_nats(composed, "reader")
    async with asyncio.timeout(60):
        while True:
            try:
                async with await connect(composed.nats.url, "reader", **own, wait_seconds=5):
                    return
            except Unavailable:
                await asyncio.sleep(0.1)
