"""deploy/helm/trinity, every pod in namespaces of its own: a run with three NATS servers that `make deploy-test` makes.

One journey: Secrets as the docs say, all pods at once, a second explorer, a NATS server that is drained, and the end.
The tests look at what was seen on the way. Neither Kubernetes nor Docker is needed.
"""

import json
import os
import socket
import ssl
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.deployed.journeys import Trainer, fill, until, write_run
from e2e.deployed.release import Pod, Release
from support.servers.certificates import identity_of
from support.servers.containers import missing, program
from support.servers.helm import render
from trinity.cluster.certs import certs
from trinity.cluster.certs.certs import Form

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not os.environ.get("TRINITY_TEST_DEPLOY"), reason="a run of many minutes: make deploy-test"),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

STEPS, GROUPS = 40, 16
ON_CPUS = {"explorer": {"gpus": 0}, "trainer": {"gpus": 0}}
SERVERS = ("nats-0", "nats-1", "nats-2")


@dataclass
class Journey:
    """What was seen on the way."""

    waiting: set[str] = field(default_factory=set)
    """Components whose probes failed at first."""
    routes: dict[tuple[str, bool], str] = field(default_factory=dict)
    """The cluster that a server says it is of, to another server and to a process without its certificate."""
    streams: dict[str, list[int]] = field(default_factory=dict)
    said: dict[str, Any] = field(default_factory=dict)
    drained: tuple[int, float] = (0, 0.0)
    code: int | None = None
    failing: dict[str, dict[str, str]] = field(default_factory=dict)
    """Probes that fail once the run is over."""
    events: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    stopped: dict[str, tuple[int, float]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def journey(
    repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Journey]:
    folder = tmp_path_factory.mktemp("helm")
    config = write_run(repository, folder / "run.yaml", steps=STEPS, groups=GROUPS)
    with Release(folder) as release:
        fill(release.claim("data"), quickstart_model, quickstart_data)
        secrets = certs.init(folder / "identity", config=config, kubernetes_form=Form.SECRETS)
        release.apply(list(yaml.safe_load_all(secrets)))
        yield travel(release, config, folder)


def travel(release: Release, config: Path, folder: Path) -> Journey:
    journey = Journey()
    release.apply(render(config, **ON_CPUS))
    pods, (of_trainer,) = release.pods, release.of("trainer")
    trainer = Trainer(release.forward(of_trainer, 7005), identity_of(folder / "identity", "operator"))
    until(lambda: _are_ready(journey, [of_trainer]), 900, "trainer whose probes succeed")
    trainer.pause()
    until(lambda: _are_ready(journey, list(pods.values())), 900, "pods whose probes succeed")
    for name in SERVERS:
        for is_peer in (True, False):
            told = _route(pods[name], folder / "identity", with_certificate=is_peer)
            journey.routes[name, is_peer] = told.get("cluster", "")
        journey.streams |= _streams(pods[name])
    trainer.train_a_step()

    two = {**ON_CPUS, "explorer": {"gpus": 0, "replicas": 2}}
    release.apply(render(config, **two))
    until(lambda: not pods["explorer-2"].probe(), 900, "second explorer whose probes succeed")
    until(lambda: len(_operator(release, "explorers")) == 2, 300, "second explorer that has joined")
    trainer.train_a_step()
    journey.drained = pods["nats-2"].stop()
    trainer.train_a_step()
    journey.said = {"status": _operator(release, "status"), "explorers": _operator(release, "explorers")}
    trainer.resume()
    journey.code = of_trainer.service.wait(1200)
    ended = ("nats-2", of_trainer.name)
    journey.failing = {name: said for name, pod in pods.items() if name not in ended and (said := pod.probe())}
    for name in ("buffer-1", "explorer-1", "explorer-2"):
        journey.events[name] = pods[name].service.events()
    services = [pod for pod in pods.values() if pod.component not in ("nats", "operator", "trainer")]
    journey.stopped = {pod.name: pod.stop() for pod in services}
    return journey


def _are_ready(journey: Journey, pods: Sequence[Pod]) -> bool:
    failing = {pod.component for pod in pods if pod.probe()}
    journey.waiting |= failing
    return not failing


def _operator(release: Release, *command: str) -> Any:
    """What a command says, as by `kubectl exec deploy/operator -- trinity ...`."""
    done = release.pods["operator-1"].container.execute([program("trinity"), *command, "--json"], 400)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return json.loads(done.stdout)


def _route(pod: Pod, identities: Path, *, with_certificate: bool) -> dict[str, Any]:
    """What nats-server says to another server first; nothing if it refuses it."""
    context = ssl.create_default_context(cafile=identities / "nats/ca.crt")
    context.check_hostname = False  # OpenSSL takes no certificate for *.nats-peers: one label is too few
    if with_certificate:
        context.load_cert_chain(identities / "nats/tls.crt", identities / "nats/tls.key")
    try:
        with (
            socket.create_connection((pod.container.address, 6222), 60) as plain,
            context.wrap_socket(plain) as connected,
        ):
            kind, _, told = connected.makefile("rb").readline().partition(b" ")
    except ssl.SSLError:
        return {}
    return dict(json.loads(told)) if kind == b"INFO" else {}


def _streams(pod: Pod) -> dict[str, list[int]]:
    """Of the streams that a server leads: replicas that are wanted, and that are current besides the leader."""
    with urllib.request.urlopen(f"http://{pod.container.address}:8222/jsz?streams=1&config=1", timeout=60) as answer:
        told = json.load(answer)
    streams = [one for account in told.get("account_details", ()) for one in account.get("stream_detail", ())]
    return {
        one["name"]: [one["config"]["num_replicas"], sum(peer["current"] for peer in one["cluster"]["replicas"])]
        for one in streams
        if one["cluster"]["leader"] == pod.name
    }


def test_probes_fail_before_a_pod_serves_and_succeed_afterwards(journey: Journey) -> None:
    assert "trainer" in journey.waiting
    assert journey.failing == {}


def test_three_nats_servers_are_a_cluster_with_tls_on_their_routes(journey: Journey) -> None:
    assert journey.routes == {(name, peer): "trinity" if peer else "" for name in SERVERS for peer in (True, False)}
    assert len(journey.streams) > 3
    assert {name: found for name, found in journey.streams.items() if found != [3, 2]} == {}


def test_a_second_explorer_joins_and_works(journey: Journey) -> None:
    found = {one["name"]: one for one in journey.said["explorers"]}
    assert sorted(found) == ["explorer/explorer-1", "explorer/explorer-2"]
    assert all(one["tokens_generated"] > 0 for one in found.values()), found
    assert {one["health"] for one in journey.said["status"]["processes"]} == {"SERVING"}


def test_the_run_outlives_a_nats_server_that_is_drained(journey: Journey) -> None:
    code, seconds = journey.drained
    assert code == 0
    assert seconds < 60, "terminationGracePeriodSeconds"


def test_the_run_learns_to_its_end(journey: Journey) -> None:
    assert journey.code == 0
    done = [event for event in journey.events["buffer-1"] if event["event"] == "buffer.evaluation.done"]
    assert {int(event["step"]) for event in done} == {0, STEPS}
    before, after = (next(e["accuracy/mean@1"] for e in done if int(e["step"]) == step) for step in (0, STEPS))
    assert float(after) > float(before) + 0.1, (before, after)


def test_pods_end_in_their_time(journey: Journey) -> None:
    assert {name: code for name, (code, _) in journey.stopped.items()} == dict.fromkeys(journey.stopped, 0)
