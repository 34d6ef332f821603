"""deploy/compose/compose.yaml, every service in namespaces of its own: the run that `make deploy-test` makes.

One journey: certificates as the docs say, the whole run under mTLS, a second explorer, an operator on another machine,
kill -9 of each service, a rollback, and the end. Explorers join from other machines, by explorers.yaml and by mode
explore, and an endpoint by mode serve. Prometheus watches, where this machine has one. The tests look at what was seen
on the way. Docker is not needed.
"""

import asyncio
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from e2e.deployed.journeys import Trainer, fill, until, write_run
from e2e.deployed.prometheus import Prometheus
from support.checks.port_scan import Kind, Port, scan
from support.servers.certificates import identity_of
from support.servers.compose import Project, Service
from support.servers.containers import Container, missing
from trinity.cluster.certs import certs

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not os.environ.get("TRINITY_TEST_DEPLOY"), reason="a run of many minutes: make deploy-test"),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

STEPS, GROUPS, REPEATS = 40, 16, 8
MAY_BE_EMPTY = {  # of a run in which all is well, without GPUs
    "fleet.json: Alerts A",
    "fleet.json: Processes that do not answer A",
    "run.json: GPU memory of the trainer A",
    "run.json: RPCs that failed, per minute A",
}
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
    guest_code: int | None = None
    answers: dict[str, int] = field(default_factory=dict)
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
    services, address = project.services, project.network.address
    prometheus = (
        Prometheus(services["prometheus"].container, folder / "prometheus") if "prometheus" in services else None
    )
    project.up(*SERVICES, *(["prometheus"] if prometheus else []))
    loading = []
    until(lambda: loading.append(services["trainer"].health()) or loading[-1][0] == 0, 600, "trainer that serves")
    until(lambda: services["explorer"].health()[0] == 0, 600, "explorer that serves")
    here = {config: "/run.yaml", folder / "data": "/data"}
    operator = Operator(project.outsider("laptop", folder / "identity/operator", files=here), address)
    trainer = Trainer(f"{address}:7005", identity_of(folder / "identity", "operator"))
    trainer.train_a_step()
    project.up("explorer-2")
    joined = operator.until(lambda seen: len(seen["explorers"]) == 2, 600, "second explorer")["explorers"]
    journey = Journey(
        [said for _, said in loading[:-1]], {name: services[name].health() for name in SERVICES}, joined, {}
    )
    for name in SERVICES:
        journey.ports[name] = scanned(services[name].container, KNOWN[name])
    for name in SERVICES:
        kill(services[name], name, trainer, journey)
    journey.said["view"] = operator.says("view", "--step", "1")
    journey.said["replay"] = operator.says("replay", "--config", "/run.yaml", "--from-step", "1", "--to-step", "2")
    journey.stopped["explorer-2"] = services["explorer-2"].stop()
    join_by_compose(project, operator, folder, journey)
    guest = join_by_command(project, operator, trainer, folder, here)
    journey.said["served"] = ask_endpoint(project, folder, here)
    look(operator, journey)
    if prometheus is not None:
        journey.answers = prometheus.answers(operator.says("status")["run"])
    trainer.resume()
    journey.code = services["trainer"].wait(900)
    journey.guest_code = guest.wait(120)
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


def join_by_compose(project: Project, operator: Operator, folder: Path, journey: Journey) -> None:
    """explorers.yaml, on another machine that has the data read-only."""
    certs.issue("explorer", name="gpu-7", folder=folder / "identity", config=folder / "run.yaml")
    given = {
        "TRINITY_CONFIG": str(folder / "run.yaml"),
        "TRINITY_DATA": str(folder / "data"),
        "TRINITY_IDENTITY": str(folder / "identity"),
        "TRINITY_EXPLORER": "gpu-7",
        "TRINITY_RUN_HOST": project.network.address,
    }
    file = project.file.with_name("explorers.yaml")
    with Project(file, given, folder / "elsewhere", project.network) as elsewhere:
        elsewhere.up()
        operator.until(lambda seen: "gpu-7/explorer-1" in names(seen), 600, "explorer by explorers.yaml")
        journey.stopped["gpu-7"] = elsewhere.services["explorer"].stop()


def join_by_command(
    project: Project, operator: Operator, trainer: Trainer, folder: Path, here: dict[Path, str]
) -> Container:
    """`trinity run` in mode explore on another machine; once it has joined, the run's only explorer for a step."""
    certs.issue("explorer", name="gpu-8", folder=folder / "identity", config=folder / "run.yaml")
    place = {"TRINITY_NATS_URL": f"nats://{project.network.address}:4222"}
    mode = ("mode=explore", "explorer.name=gpu-8", "checkpoint_root_dir=/tmp/checkpoints")
    command = ("trinity", "run", "--config", "/run.yaml", *mode)
    guest = project.outsider("gpu-8", folder / "identity/gpu-8", *command, files=here, **place)
    operator.until(lambda seen: "gpu-8" in names(seen), 600, "explorer by mode explore")
    project.services["explorer"].stop()
    trainer.train_a_step()
    project.up("explorer")
    return guest


def ask_endpoint(project: Project, folder: Path, here: dict[Path, str]) -> dict[str, Any]:
    """`trinity run` in mode serve on another machine: what it says, and answers to a caller with a key."""
    certs.issue("explorer", name="serve", folder=folder / "identity", config=folder / "run.yaml")
    (folder / "keys").write_text("a-key-of-the-test\n")
    place = {"TRINITY_NATS_URL": f"nats://{project.network.address}:4222", "TRINITY_EXPLORER_API_KEYS_FILE": "/keys"}
    mode = ("mode=serve", "explorer.listen_address=0.0.0.0", "explorer.proxy_port=8010",
            "checkpoint_root_dir=/tmp/checkpoints")  # fmt: skip
    command = ("trinity", "run", "--config", "/run.yaml", *mode)
    files = {**here, folder / "keys": "/keys"}
    front = project.outsider("front", folder / "identity/serve", *command, files=files, **place)
    question = {"model": "rft", "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4}
    headers = {"Authorization": "Bearer a-key-of-the-test", "Content-Type": "application/json"}
    url, deadline = f"http://{front.address}:8010/v1/chat/completions", time.monotonic() + 600
    while True:
        try:
            request = urllib.request.Request(url, json.dumps(question).encode(), headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                found: dict[str, Any] = json.load(answer)
                break
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError) and error.code != 503:
                raise
            assert time.monotonic() < deadline and front.pid, front.output()
            time.sleep(1)
    front.stop(30)
    return found | {"said": front.output()}


def names(status: dict[str, Any]) -> set[str]:
    """Of its explorers."""
    return {one["name"] for one in status["explorers"]}


def look(operator: Operator, journey: Journey) -> None:
    """What an operator's commands say of the run, and a rollback."""
    said = journey.said
    both = {"explorer/explorer-1", "gpu-8"}
    operator.until(lambda seen: names(seen) == both, 600, "explorer that is back, and no other left")
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
    assert sorted(one["name"] for one in journey.joined) == ["explorer/explorer-1", "explorer/explorer-2-1"]


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


def test_view_and_replay_work_on_another_machine(journey: Journey) -> None:
    rows = journey.said["view"]
    assert len(rows) == GROUPS * REPEATS
    assert {row["step"] for row in rows} == {1}
    assert journey.said["replay"]["identical"]
    assert [step["step"] for step in journey.said["replay"]["steps"] if step["compared"]] == [1, 2]


def test_an_explorer_and_an_endpoint_join_by_what_nats_announces(journey: Journey) -> None:
    assert journey.guest_code == 0
    assert journey.said["served"]["choices"][0]["message"]["content"]
    assert "following the live run" in journey.said["served"]["said"]


def test_prometheus_answers_every_query_of_dashboards_and_alerts(journey: Journey) -> None:
    if not journey.answers:
        pytest.skip("no prometheus here: apt-get install prometheus")
    empty = {name for name, found in journey.answers.items() if not found and not name.startswith("alert ")}
    assert empty <= MAY_BE_EMPTY
    assert len(journey.answers) > 60


def test_the_run_learns_and_its_last_evaluation_is_kept(journey: Journey) -> None:
    done = [event for event in journey.events["buffer"] if event["event"] == "buffer.evaluation.done"]
    assert {int(event["step"]) for event in done} == {0, STEPS}
    before, after = (next(e["accuracy/mean@1"] for e in done if int(e["step"]) == step) for step in (0, STEPS))
    assert float(after) > float(before) + 0.1, (before, after)


def test_a_container_ends_soon_after_sigterm(journey: Journey) -> None:
    assert {name: code for name, (code, _) in journey.stopped.items()} == dict.fromkeys(journey.stopped, 0)
    assert max(seconds for _, seconds in journey.stopped.values()) < 10, journey.stopped
