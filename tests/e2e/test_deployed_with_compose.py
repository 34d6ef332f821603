"""deploy/compose/compose.yaml, every service in namespaces of its own: the run that `make deploy-test` makes.

One journey: certificates as the docs say, the whole run under mTLS, a second explorer, an operator on another machine,
kill -9 of each service, a rollback, and the end. The tests look at what was seen on the way. Docker is not needed.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.deploy.compose import Project, Service
from support.deploy.containers import Container, missing
from support.deploy.journeys import Trainer, fill, until, write_run
from support.services.certificates import identity_of
from support.services.port_scan import Kind, Port, scan
from trinity.cli.commands.certs import certs

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not os.environ.get("TRINITY_TEST_DEPLOY"), reason="a run of many minutes: make deploy-test"),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

STEPS, GROUPS = 40, 16
SERVICES = ("nats", "buffer", "sync", "environment", "explorer", "trainer")
KNOWN = {  # ports of the file that other containers reach
    "nats": {4222: Kind.NATS},
    **{
        name: {port: Kind.TLS, port + 2000: Kind.HTTP}
        for name, port in (
            ("buffer", 7001),
            ("environment", 7002),
            ("explorer", 7003),
            ("sync", 7004),
            ("trainer", 7005),
        )
    },
}


@dataclass
class Journey:
    """What was seen on the way."""

    health_before: list[str]
    health: dict[str, tuple[int, str]]
    joined: list[dict[str, Any]]
    ports: dict[str, dict[Port, Kind]]
    said: dict[str, Any] = field(default_factory=dict)
    killed_at: dict[str, int] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    stopped: dict[str, tuple[int, float]] = field(default_factory=dict)
    code: int | None = None
    events: dict[str, list[dict[str, str]]] = field(default_factory=dict)


class Operator:
    """The command line on another machine, with the operator's identity alone."""

    def __init__(self, machine: Container, address: str) -> None:
        self._machine = machine
        self._where = ["--nats", f"nats://{address}:4222", "--run", "rft"]

    def says(self, *command: str) -> Any:
        done = self._machine.execute(
            [str(Path(sys.executable).with_name("trinity")), *command, *self._where, "--json"], 400
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return json.loads(done.stdout)

    def until(self, condition: Callable[[Any], object], wait_seconds: float, what: str) -> Any:
        deadline, seen = time.monotonic() + wait_seconds, None
        while time.monotonic() < deadline:
            seen = self.says("status")
            if condition(seen):
                return seen
            time.sleep(1)
        raise AssertionError(f"no {what} within {wait_seconds:g} s; the last status: {seen}")


@pytest.fixture(scope="module")
def journey(
    repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Journey]:
    folder = tmp_path_factory.mktemp("deployed")
    config = write_run(repository, folder / "run.yaml", steps=STEPS, groups=GROUPS)
    fill(folder / "data", quickstart_model, quickstart_data)
    given = {
        "TRINITY_CONFIG": str(config),
        "TRINITY_DATA": str(folder / "data"),
        "TRINITY_IDENTITY": str(folder / "identity"),
    }
    with Project(repository / "deploy/compose/compose.yaml", given, folder / "containers") as project:
        yield travel(project, config, folder)


def travel(project: Project, config: Path, folder: Path) -> Journey:
    certs.init(folder / "identity", config=config, host=[project.network.address])
    project.up()
    services, address = project.services, project.network.address
    loading = []
    until(lambda: loading.append(services["trainer"].health()) or loading[-1][0] == 0, 600, "trainer that serves")
    until(lambda: services["explorer"].health()[0] == 0, 600, "explorer that serves")
    operator = Operator(project.outsider("laptop", folder / "identity/operator"), address)
    trainer = Trainer(f"{address}:7005", identity_of(folder / "identity", "operator"))
    trainer.train_a_step()
    extra = project.scale("explorer", 2)
    joined = operator.until(lambda seen: len(seen["explorers"]) == 2, 600, "second explorer")["explorers"]
    journey = Journey(
        [said for _, said in loading[:-1]], {name: services[name].health() for name in SERVICES}, joined, {}
    )
    for name in SERVICES:
        journey.ports[name] = scanned(services[name].container, KNOWN[name])
    for name in SERVICES:
        kill(services[name], name, trainer, journey)
    look(operator, journey)
    journey.stopped["explorer-2"] = extra.stop()
    trainer.resume()
    journey.code = services["trainer"].wait(900)
    journey.events = {name: services[name].events() for name in ("buffer", "explorer")}
    journey.restarts = {name: services[name].restarts for name in SERVICES}
    journey.stopped |= {name: services[name].stop() for name in SERVICES if name != "trainer"}
    return journey


def scanned(container: Container, known: dict[int, Kind]) -> dict[Port, Kind]:
    """How the ports that others reach answer a machine without an identity."""
    ports = [port for port in container.listening() if not port.is_local]
    return asyncio.run(scan(ports, known, container.address))


def kill(service: Service, name: str, trainer: Trainer, journey: Journey) -> None:
    """kill -9 while the trainer waits, and a further step once the container's restart is healthy."""
    journey.killed_at[name] = trainer.step
    service.container.kill()
    until(lambda: service.restarts == 1 and service.health()[0] == 0, 600, f"healthy {name} after kill -9")
    trainer.train_a_step()


def look(operator: Operator, journey: Journey) -> None:
    """What an operator's commands say of the run, and a rollback."""
    said = journey.said
    said["weights"] = operator.says("weights", "list")
    older = [one["version"] for one in said["weights"] if one["state"] != "LIVE"]
    said["rolled back to"] = max(older)
    said["rollback"] = operator.says("weights", "rollback", str(max(older)), "--yes")
    said["explorers"] = operator.says("explorers")
    said["dead letters"] = operator.says("deadletters", "list")
    said["status"] = operator.says("status")


def test_the_trainer_is_serving_once_its_model_is_loaded(journey: Journey) -> None:
    assert any("NOT_SERVING" in said for said in journey.health_before)
    assert journey.health["trainer"][0] == 0


def test_healthchecks_of_the_file_succeed(journey: Journey) -> None:
    assert {name: code for name, (code, _) in journey.health.items()} == dict.fromkeys(SERVICES, 0), journey.health


def test_a_second_explorer_joins(journey: Journey) -> None:
    assert sorted(one["name"] for one in journey.joined) == ["explorer/explorer-1", "explorer/explorer-2"]


@pytest.mark.parametrize("name", SERVICES)
def test_other_machines_reach_the_ports_of_the_file_and_those_of_collectives(journey: Journey, name: str) -> None:
    found = {port.port: kind for port, kind in journey.ports[name].items()}
    assert {port: kind for port, kind in found.items() if port in KNOWN[name]} == KNOWN[name]
    others = {kind for port, kind in found.items() if port not in KNOWN[name]}  # docs/security.md, "gloo's sockets"
    assert others <= ({Kind.SILENT, Kind.STORE} if name in ("explorer", "trainer") else set()), journey.ports[name]


def test_each_killed_service_starts_again_and_the_run_continues(journey: Journey) -> None:
    assert all(step < STEPS for step in journey.killed_at.values()), journey.killed_at
    assert journey.restarts == dict.fromkeys(SERVICES, 1)
    assert journey.code == 0


def test_an_operator_sees_and_steers_the_run_from_another_machine(journey: Journey) -> None:
    said = journey.said
    assert {one["name"] for one in said["status"]["processes"]} >= {"buffer", "environment", "sync", "trainer"}
    assert {one["health"] for one in said["status"]["processes"]} == {"SERVING"}
    assert len(said["explorers"]) == 2
    assert said["dead letters"] == []
    assert said["rollback"]["rollback"]["version"] == said["rolled back to"]


def test_the_run_learns_and_its_last_evaluation_is_kept(journey: Journey) -> None:
    done = [event for event in journey.events["buffer"] if event["event"] == "buffer.evaluation.done"]
    assert {int(event["step"]) for event in done} == {0, STEPS}
    before, after = (next(e["accuracy/mean@1"] for e in done if int(e["step"]) == step) for step in (0, STEPS))
    assert float(after) > float(before) + 0.1, (before, after)


def test_a_container_ends_soon_after_sigterm(journey: Journey) -> None:
    assert {name: code for name, (code, _) in journey.stopped.items()} == dict.fromkeys(journey.stopped, 0)
    assert max(seconds for _, seconds in journey.stopped.values()) < 10, journey.stopped
