"""A further machine of the trainer over gRPC: it trains in each group of the first, and ends with the training."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from trinity.config import Config, make_plan
from trinity.runtime import rpc
from trinity.runtime.errors import InvalidInput
from trinity.runtime.process import free_port
from trinity.trainer import node as module
from trinity.trainer.node import NodeService
from trinity.trainer.process.control import Control
from trinity.trainer.process.nodes import Nodes, this_node
from trinity.trainer.process.ranks import Ranks
from trinity.trainer.servicer import TrainerServicer
from trinity.trainer.settings import TrainerSettings

pytestmark = pytest.mark.core

SECONDS = 20.0


def plan_of(**cluster: Any) -> Any:
    model = {"model_path": "m", "max_model_len": 64}
    values = {"model": model, "cluster": {"node_num": 2, "node_timeout": 3, **cluster}}
    return make_plan(Config.model_validate(values))


class Site:
    """The first machine's server, whose process may be replaced, and one further node."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.port = free_port()
        self.started: list[subprocess.Popen[bytes]] = []
        self.groups: list[Ranks] = []
        self.spares: list[int] = []
        monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.05)
        monkeypatch.setattr(module, "launch", self._launch)
        monkeypatch.setattr(module, "keep_spares", self.spares.append)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                     "TRINITY_LAUNCHES_RANKS", "TRINITY_RANKS_STORE", "TRINITY_RANKS_FILE",
                     "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # fmt: skip
            monkeypatch.setenv(name, os.environ.get(name, ""))  # restored after the test
            monkeypatch.delenv(name)

    def _launch(self, ranks: Ranks, places: range, *_: Any) -> list[subprocess.Popen[bytes]]:
        self.groups.append(ranks)
        self.started += [subprocess.Popen(["sleep", "60"]) for _ in places]
        return self.started[-len(places) :]

    @asynccontextmanager
    async def first(self) -> AsyncIterator[Nodes]:
        nodes = Nodes(this_node(plan_of(node_name="one"), "run", 2, "cpu"), plan_of().config.cluster, lambda text: None)
        server = grpc.aio.server(interceptors=[rpc.Edge()], options=rpc.SERVER_OPTIONS)
        TrainerServicer(Control(), "run", 2, Path("job"), nodes).add_to(server)
        assert server.add_insecure_port(f"127.0.0.1:{self.port}") == self.port
        await server.start()
        try:
            yield nodes
        finally:
            await server.stop(None)

    def node(self, **cluster: Any) -> NodeService:
        service = object.__new__(NodeService)
        service._settings = TrainerSettings(first_address=f"127.0.0.1:{self.port}", num_ranks=3, device="cpu")
        service._plan, service.run_id, service._host = plan_of(node_name="two", **cluster), "run", "127.0.0.1"
        service._outbox, service._children, service._ended = asyncio.Queue(), [], asyncio.Event()
        service._leaves = False
        return service

    async def group(self, nodes: Nodes, number: int) -> None:
        async with asyncio.timeout(SECONDS):
            await nodes.wait()
            assert nodes.form(9, "secret") == 5
            while len(self.groups) < number:
                await asyncio.sleep(0.01)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Any:
    site = Site(monkeypatch)
    yield site
    for child in site.started:
        child.kill()
        child.wait()


async def test_it_trains_again_with_a_new_first_and_ends_when_the_training_is_finished(site: Site) -> None:
    node, ready = site.node(), asyncio.Event()
    working = asyncio.create_task(node.work(ready, ""))  # before the first
    async with site.first() as nodes:
        await site.group(nodes, 1)
        assert (site.groups[0].rank, site.groups[0].world_size, site.groups[0].here) == (2, 5, 3)
        assert ready.is_set()
    async with site.first() as nodes:
        await site.group(nodes, 2)
        assert set(site.spares) == {3} and len(site.spares) > 1, "ranks load while the nodes wait for each other"
        assert [child.poll() for child in site.started] == [-9] * 3 + [None] * 3, "ranks end with their group"
        site.started[3].kill()
        assert not nodes.lost.done()
        await nodes.finish()
        await asyncio.wait_for(working, SECONDS)
    assert all(child.poll() is not None for child in site.started)


async def test_it_tells_that_it_leaves_and_waits_until_the_first_has_saved(site: Site) -> None:
    node = site.node()
    working = asyncio.create_task(node.work(asyncio.Event(), ""))
    async with site.first() as nodes:
        await site.group(nodes, 1)
        draining = asyncio.create_task(node.drain(SECONDS))
        assert await asyncio.wait_for(asyncio.shield(nodes.changed), SECONDS) == "node two leaves"
        await asyncio.sleep(0.2)
        assert not draining.done() and site.started[0].poll() is None, "its ranks take part in the checkpoint"
    await asyncio.wait_for(draining, SECONDS)
    await asyncio.wait_for(working, SECONDS)
    assert all(child.poll() is not None for child in site.started)


async def test_it_ends_with_the_reason_of_its_refusal(site: Site) -> None:
    node = site.node()
    node.run_id = "other"
    async with site.first():
        with pytest.raises(InvalidInput, match="two is refused: it is of the run other, and this is run"):
            await asyncio.wait_for(node.work(asyncio.Event(), ""), SECONDS)
