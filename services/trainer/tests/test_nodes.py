"""Machines of a trainer: who is admitted, when they begin, and what ends their group."""

import asyncio
import contextlib
import importlib.metadata
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from trinity.config import Config, make_plan
from trinity.config.schema.model import ClusterConfig
from trinity.runtime.errors import Conflict, InvalidInput, TimedOut, TrinityError
from trinity.runtime.version import installed_version
from trinity.trainer import wire
from trinity.trainer.process import nodes as module
from trinity.trainer.process.nodes import (
    Beat,
    Finished,
    FromNode,
    Leaving,
    Node,
    Nodes,
    RankEnded,
    RankGroup,
    ToNode,
    Waiting,
    refusal,
    shared_config,
    this_node,
)

pytestmark = pytest.mark.core

FIRST = Node("run", "one", "1", 2, "cpu", {"torch": "2.9"}, {"trainer.grad_clip": "a", "algorithm.gamma": "b"})


def further(name: str = "two", **changes: Any) -> Node:
    return replace(FIRST, name=name, process=name, **changes)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(module, "COMES_AGAIN_SECONDS", 0.0)


class Peer:
    """The other end of a stream. `says` sends a message; `heard` has the answers."""

    def __init__(self, nodes: Nodes, node: Node, beats: bool = True) -> None:
        self.heard: list[ToNode] = []
        self._outbox: asyncio.Queue[FromNode] = asyncio.Queue()
        self._outbox.put_nowait(node)
        self._beats = beats
        self.task = asyncio.create_task(self._run(nodes))

    def says(self, message: FromNode) -> None:
        self._outbox.put_nowait(message)

    async def _run(self, nodes: Nodes) -> None:
        async for answer in nodes.join(self._messages(), "10.0.0.2"):
            self.heard.append(answer)

    async def _messages(self) -> AsyncIterator[FromNode]:
        while True:
            message: FromNode | None = Beat() if self._beats else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    message = await self._outbox.get()
            if message is not None:
                yield message

    async def until(self, kind: type) -> Any:
        while True:
            if found := [one for one in self.heard if isinstance(one, kind)]:
                return found[-1]
            await asyncio.sleep(0.005)

    async def leave(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


def three(**changes: Any) -> tuple[Nodes, list[str]]:
    said: list[str] = []
    cluster = ClusterConfig(**{"node_num": 3, "node_timeout": 3, **changes})
    return Nodes(FIRST, cluster, said.append), said


async def test_ranks_are_numbered_by_the_names_of_nodes_in_whatever_order_they_come() -> None:
    nodes, said = three()
    waits = asyncio.create_task(nodes.wait())
    late = Peer(nodes, further("two", ranks=3))
    assert "1 more node(s)" in (await late.until(Waiting)).text
    assert not waits.done()
    early = Peer(nodes, further("three", ranks=1))
    await asyncio.wait_for(waits, 5)
    assert nodes.form(77, "secret") == 6
    assert await early.until(RankGroup) == RankGroup(2, 6, 77, "secret")
    assert await late.until(RankGroup) == RankGroup(3, 6, 77, "secret")
    assert nodes.members() == (("one", 2), ("three", 1), ("two", 3))
    assert "2 of 3 nodes are here (one, two)" in said[-1]
    await nodes.finish()
    assert isinstance(await early.until(Finished), Finished)


async def test_it_begins_with_fewer_after_the_wait_but_never_with_too_few() -> None:
    nodes, said = three(least_nodes=2, node_wait=0.2)
    waits = asyncio.create_task(nodes.wait())
    await asyncio.sleep(0.4)
    assert not waits.done()
    Peer(nodes, further())
    await asyncio.wait_for(waits, 5)
    nodes, said = three(least_nodes=2, node_wait=5)
    Peer(nodes, further())
    waits = asyncio.create_task(nodes.wait())
    await asyncio.sleep(0.2)
    assert "goes on with these after 5 s" in said[-1]
    waits.cancel()


async def test_a_node_for_which_the_group_has_ended_has_time_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group would end for it, and the next begin without it, for ever."""
    monkeypatch.setattr(module, "COMES_AGAIN_SECONDS", 2.0)
    nodes, _ = three(least_nodes=1, node_wait=0)
    waits = asyncio.create_task(nodes.wait())
    await asyncio.sleep(0.3)
    for name in ("two", "three"):
        Peer(nodes, further(name))
    await asyncio.wait_for(waits, 1)
    assert len(nodes.members()) == 3


async def test_it_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 0.1)
    nodes, _ = three()
    with pytest.raises(TimedOut, match=r"1 of 3 nodes are here \(one\)"):
        await nodes.wait()


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (further(run="other"), "of the run other, and this is run"),
        (further(versions={"torch": "2.8"}), "torch 2.8, and the first node 2.9"),
        (further(versions={}), "torch None"),
        (further(device="NVIDIA H100"), "trains on NVIDIA H100, and the first node on cpu"),
        (further(config={**FIRST.config, "trainer.grad_clip": "c"}), "in trainer.grad_clip; use the same YAML"),
        (further(config={}), "in algorithm.gamma and 1 more key"),
        (further("one"), "has a node of this name"),
    ],
    ids=lambda value: "" if isinstance(value, Node) else value,
)
async def test_a_node_that_cannot_train_with_the_first_is_refused_in_a_sentence(node: Node, reason: str) -> None:
    nodes, _ = three()
    with pytest.raises((InvalidInput, Conflict), match=reason) as refused:
        await Peer(nodes, node).task
    assert str(refused.value).count(". ") == 0
    assert nodes.members() == (("one", 2),)


async def test_a_name_is_one_process_and_the_number_is_the_yamls() -> None:
    nodes, _ = three(node_num=2)
    Peer(nodes, further())
    await asyncio.sleep(0.05)
    with pytest.raises(Conflict, match="this name"):
        await Peer(nodes, replace(further(), process="else")).task
    with pytest.raises(Conflict, match="its 2 nodes"):
        await Peer(nodes, further("three")).task
    with pytest.raises(InvalidInput, match="first message"):
        await Peer(nodes, Beat()).task  # type: ignore[arg-type]


async def formed(**changes: Any) -> tuple[Nodes, Peer]:
    nodes, _ = three(least_nodes=1, node_wait=0.1, **changes)
    peer = Peer(nodes, further())
    while len(nodes.members()) < 2:
        await asyncio.sleep(0.01)
    await nodes.wait()
    nodes.form(1, "s")
    return nodes, peer


async def test_an_ended_connection_is_a_lost_node() -> None:
    nodes, peer = await formed()
    await peer.leave()
    await asyncio.wait_for(nodes.lost, 1)
    assert (await nodes.loss()).reason.startswith("node two is lost: its connection has ended")


async def test_a_silent_node_is_lost_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, peer = await formed()
    peer._beats = False
    await asyncio.sleep(0.5)
    assert not nodes.lost.done()
    await asyncio.wait_for(nodes.lost, 5)
    assert "silent for" in (await nodes.loss()).reason
    with pytest.raises(TrinityError, match="silent"):
        await peer.task


async def test_the_cause_of_a_loss_is_told_also_if_a_consequence_comes_before_it() -> None:
    nodes, peer = await formed()
    peer.says(RankEnded(2, 1))
    peer.says(RankEnded(3, -9))
    await asyncio.wait_for(nodes.lost, 1)
    loss = await nodes.loss()
    assert (loss.reason, loss.order) == ("rank 3 of node two ended with code -9; see its log", 1)


async def test_a_node_that_leaves_or_comes_changes_the_group_and_loses_nothing() -> None:
    nodes, peer = await formed()
    peer.says(Leaving())
    assert await asyncio.wait_for(nodes.changed, 1) == "node two leaves"
    assert not nodes.lost.done()
    nodes, _ = await formed()
    Peer(nodes, further("three"))
    assert await asyncio.wait_for(nodes.changed, 1) == "node three has come"
    assert nodes.members()[1:] == (("three", 2), ("two", 2))


def test_a_node_tells_the_versions_of_the_libraries_that_compute() -> None:
    plan = make_plan(Config.model_validate({"model": {"model_path": "m", "max_model_len": 64}}))
    told = this_node(plan, "run", 1, "cpu").versions
    own = {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "transformers")}
    assert told == {**own, "trinity-trainer": installed_version("trinity-trainer")}
    other = further(versions={**told, "deepspeed": "0.1"})
    assert refusal(replace(FIRST, versions=told), other).startswith("it has deepspeed 0.1, and the first node ")


def test_machines_may_differ_in_paths_and_devices_but_in_nothing_that_ranks_compute() -> None:
    config = Config()
    own = {"mode": "train", "checkpoint_root_dir": "/x", "cluster": ClusterConfig(node_name="two")}
    assert shared_config(config.model_copy(update=own)) == shared_config(config)
    changed = config.model_copy(update={"trainer": config.trainer.model_copy(update={"grad_clip": 0.3})})
    different = {key for key, digest in shared_config(config).items() if shared_config(changed)[key] != digest}
    assert different == {"trainer.grad_clip"}


@pytest.mark.parametrize("message", [further(), Beat(), RankEnded(3, -9), Leaving()], ids=lambda m: type(m).__name__)
def test_messages_of_nodes_cross_the_wire(message: FromNode) -> None:
    found = wire.from_node(wire.to_first(message))
    assert found == message or type(found) is type(message) in (Beat, Leaving)


@pytest.mark.parametrize(
    "message", [RankGroup(2, 6, 77, "s"), Waiting("for two"), Beat(), Finished()], ids=lambda m: type(m).__name__
)
def test_answers_cross_the_wire(message: ToNode) -> None:
    found = wire.from_first(wire.to_node(message))
    assert found == message or type(found) is type(message) in (Beat, Finished)


def test_nonsense_is_refused() -> None:
    from trinity.api.trainer.v1 import trainer_pb2 as pb

    for message in (pb.JoinNodeRequest(), pb.JoinNodeRequest(node=pb.Node(name="a", process="b", ranks=-1))):
        with pytest.raises(InvalidInput):
            wire.from_node(message)
