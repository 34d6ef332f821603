"""Nodes, the machines whose ranks train together, as the first one sees them.

    join (each further node's stream) -> form -> changed | lost -> the process ends, and is started again

A group is never repaired: once a node is lost, leaves or comes, all its ranks end, and the nodes that are there form
another group, which begins at the newest checkpoint.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from trinity.config import Config, Plan, dump
from trinity.config.schema.model import ClusterConfig
from trinity.runtime.devices import detect_gpus
from trinity.runtime.errors import Conflict, InvalidInput, TimedOut
from trinity.runtime.trust import identity
from trinity.runtime.version import installed_version
from trinity.runtime.waits import START_SECONDS, text_of, waiting

log = structlog.get_logger(__name__)

BEAT_SECONDS = 1.0
COMES_AGAIN_SECONDS = 3.0  # a group ends for a node that has come: it needs 1.4 s to be there again
_PACKAGES = ("trinity-trainer", "torch", "deepspeed", "transformers")
# Keys that only one machine reads: paths, devices and names of its own, and what only the first node's services do.
_OWN = (
    "mode", "checkpoint_root_dir", "cluster", "explorer", "monitor", "budget", "data_processor",
    "buffer.explorer_input", "buffer.trainer_input", "synchronizer.storage",
)  # fmt: skip


@dataclass(frozen=True)
class Node:
    """A machine of the trainer. device: kind of its GPUs, or "cpu". config: digests by key, as of `shared_config`."""

    run: str
    name: str
    process: str
    ranks: int
    device: str
    versions: Mapping[str, str]
    config: Mapping[str, str]


@dataclass(frozen=True)
class RankGroup:
    """The part of a group that a node needs: its own lowest rank, and the store in which all meet."""

    first_rank: int
    world_size: int
    store_port: int
    store_secret: str


@dataclass(frozen=True)
class RankEnded:
    rank: int
    code: int


@dataclass(frozen=True)
class Waiting:
    """The nodes that are awaited, as text."""

    text: str


@dataclass(frozen=True)
class Loss:
    """Why the group is over. order: 0 a node is lost, 1 a rank was killed, 2 a rank ended by itself."""

    reason: str
    order: int


class Beat:
    """Proves that its sender lives."""


class Leaving:
    """The node is asked to end."""


class Finished:
    """The training is finished."""


FromNode = Node | Beat | RankEnded | Leaving
ToNode = Beat | Waiting | RankGroup | Finished


def this_node(plan: Plan, run: str, ranks: int, device: str) -> Node:
    """Describes this machine. device: "auto", "cpu" or "cuda", as in the settings.

    Its name is the YAML's, else that of its own certificate, else the host's.
    """
    own = identity.own()
    certified = own.tls.current().name if own is not None and own.tls is not None else ""
    shared = certified in ("", "trainer")  # as of the pods of a StatefulSet
    name = plan.config.cluster.node_name or (socket.gethostname() if shared else certified)
    kinds = sorted({card.name for card in detect_gpus()}) if device != "cpu" else []
    versions = {package: installed_version(package) for package in _PACKAGES}
    process = f"{os.getpid()}-{time.time_ns()}"
    return Node(run, name, process, ranks, ", ".join(kinds) or "cpu", versions, shared_config(plan.config))


def refusal(first: Node, other: Node) -> str:
    """Returns why a node cannot train with the first one, in one sentence; empty if it can."""
    if first.run != other.run:
        return f"it is of the run {other.run}, and this is {first.run}"
    for package, version in first.versions.items():
        if (theirs := other.versions.get(package)) != version:
            return f"it has {package} {theirs}, and the first node {version}; install the same"
    if first.device != other.device:
        return f"it trains on {other.device}, and the first node on {first.device}; use machines of one kind"
    keys = sorted(key for key in {*first.config, *other.config} if first.config.get(key) != other.config.get(key))
    if keys:
        more = f" and {len(keys) - 1} more key(s)" if len(keys) > 1 else ""
        return f"its YAML differs from the first node's in {keys[0]}{more}; use the same YAML on all nodes"
    return ""


@dataclass
class _Joined:
    """A further node, and its messages."""

    node: Node
    host: str
    heard: float
    outbox: "asyncio.Queue[ToNode]" = field(default_factory=asyncio.Queue)
    in_group: bool = False


class Nodes:
    """The further nodes of the trainer. Of one event loop. say(text): the text of what is awaited, for the status."""

    def __init__(self, first: Node, cluster: ClusterConfig, say: Callable[[str], None]) -> None:
        self._first = first
        self._most = cluster.nodes
        self._least = cluster.fewest_nodes
        self._wait_seconds = max(cluster.node_wait, COMES_AGAIN_SECONDS)
        self._silent_seconds = cluster.node_timeout
        self._say = say
        self._joined: dict[str, _Joined] = {}
        self._moved = asyncio.Event()
        self._formed = False
        self._finished = False
        self._losses: list[Loss] = []
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    # A further node's stream

    async def join(self, messages: AsyncIterator[FromNode], host: str) -> AsyncIterator[ToNode]:
        """Serves the stream of one node. Raises InvalidInput or Conflict if it cannot be one of the run's."""
        stream = aiter(messages)
        node = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._silent_seconds):
                node = await anext(stream, None)
        if not isinstance(node, Node):
            raise InvalidInput("node", "is missing; it must be the first message")
        self._admit(node)
        joined = self._joined[node.name] = _Joined(node, host, time.monotonic())
        reading = asyncio.create_task(self._read(joined, stream))
        log.info("trainer.node.joined", node=node.name, ranks=node.ranks, host=host)
        self._move()
        if self._formed:
            self._change(f"node {node.name} has come")
        try:
            async for message in self._messages(joined, reading):
                yield message
        finally:
            reading.cancel()
            self._remove(joined, "its connection has ended")

    def _admit(self, node: Node) -> None:
        reason, here = refusal(self._first, node), self._joined.get(node.name)
        if reason:
            log.warning("trainer.node.refused", node=node.name, reason=reason)
            raise InvalidInput("node", f"{node.name} is refused: {reason}")
        if node.name == self._first.name or (here is not None and here.node.process != node.process):
            log.warning("trainer.node.refused", node=node.name, reason="the run has a node of this name")
            raise Conflict(f"node {node.name} is refused: the run has a node of this name; set cluster.node_name")
        if here is None and len(self._joined) + 1 >= self._most:
            log.warning("trainer.node.refused", node=node.name, reason=f"the run has its {self._most} nodes")
            raise Conflict(f"node {node.name} is refused: the run has its {self._most} nodes (cluster.node_num)")
        if here is not None:
            self._remove(here, "it has come again")

    async def _messages(self, joined: _Joined, reading: "asyncio.Task[None]") -> AsyncIterator[ToNode]:
        while not reading.done():
            message: ToNode = Beat()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_SECONDS):  # wait_for may lose a cancellation before Python 3.12
                    message = await joined.outbox.get()
            yield message
            if isinstance(message, Finished):
                return
            silent = time.monotonic() - joined.heard
            if silent > self._silent_seconds:
                self._remove(joined, f"it has been silent for {silent:.0f} s")
                raise TimedOut(f"node {joined.node.name} has been silent for {silent:.0f} s")

    async def _read(self, joined: _Joined, stream: AsyncIterator[FromNode]) -> None:
        name = joined.node.name
        async for message in stream:
            joined.heard = time.monotonic()
            match message:
                case RankEnded(rank, code) if joined.in_group:
                    self._lose(Loss(f"rank {rank} of node {name} ended with code {code}; see its log", 1 + (code >= 0)))
                case Leaving():
                    if self._formed and joined.in_group:
                        self._change(f"node {name} leaves")
                    else:
                        return

    def _remove(self, joined: _Joined, reason: str) -> None:
        name = joined.node.name
        if self._joined.get(name) is not joined:
            return
        del self._joined[name]
        self._move()
        log.info("trainer.node.gone", node=name, reason=reason)
        if joined.in_group:
            self._lose(Loss(f"node {name} is lost: {reason}", 0))

    def _lose(self, loss: Loss) -> None:
        self._losses.append(loss)
        if not self._finished and not self._lost.done():
            self._lost.set_result(None)

    def _change(self, reason: str) -> None:
        if not self._finished and not self._changed.done():
            self._changed.set_result(reason)

    def _move(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    # The first node

    async def wait(self) -> None:
        """Waits for all nodes, or for as many as may train without the others. Raises TimedOut."""
        begin = time.monotonic()
        while True:
            here = [self._first.name, *self._joined]
            now = time.monotonic() - begin
            if len(here) >= self._most or (len(here) >= self._least and now >= self._wait_seconds):
                return
            enough = len(here) >= self._least
            limit = self._wait_seconds if enough else START_SECONDS
            if now > START_SECONDS and not enough:
                raise TimedOut(f"{self._text(here)}; the trainer has waited {START_SECONDS:g} s")
            why = f"{self._text(here)}{f'; goes on with these after {limit:g} s' if enough else ''}"
            whom = f"{self._most - len(here)} more node(s)"
            self._say(f"{whom}: {why}")
            for joined in self._joined.values():
                joined.outbox.put_nowait(Waiting(text_of(whom, why, None if enough else limit)))
            moved = self._moved
            with waiting(whom, why, limit_seconds=None if enough else limit), contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.05, limit - now)):
                    await moved.wait()

    def _text(self, here: list[str]) -> str:
        return f"{len(here)} of {self._most} nodes are here ({', '.join(here)}); others join by mode=train_node"

    def form(self, port: int, secret: str) -> int:
        """Makes a group of the nodes that are there, in the order of their names; returns its number of ranks."""
        members = sorted(self._joined.values(), key=lambda joined: joined.node.name)
        world_size = self._first.ranks + sum(joined.node.ranks for joined in members)
        rank = self._first.ranks
        for joined in members:
            joined.in_group = True
            joined.outbox.put_nowait(RankGroup(rank, world_size, port, secret))
            rank += joined.node.ranks
        self._formed = True
        log.info("trainer.nodes.formed", nodes=[name for name, _ in self.members()], ranks=world_size)
        return world_size

    def members(self) -> tuple[tuple[str, int], ...]:
        """Returns the names of the nodes that are there, the first one first, with their numbers of ranks."""
        others = sorted((joined.node.name, joined.node.ranks) for joined in self._joined.values())
        return ((self._first.name, self._first.ranks), *others)

    def hosts(self) -> list[str]:
        """Returns the addresses from which further nodes have come."""
        return [joined.host for joined in self._joined.values()]

    @property
    def lost(self) -> "asyncio.Future[None]":
        """Resolves once the group has lost a node or one of its ranks."""
        return self._lost

    async def loss(self) -> Loss:
        """Returns the cause among the losses that follow each other: ranks end because another one or a node has."""
        await asyncio.sleep(BEAT_SECONDS)
        return min(self._losses, key=lambda loss: loss.order)

    @property
    def changed(self) -> "asyncio.Future[str]":
        """Resolves to the reason once a node leaves or comes, so that the group should be formed again."""
        return self._changed

    async def finish(self) -> None:
        """Tells the nodes that the training is finished, and gives them a moment to hear it."""
        self._finished = True
        for joined in self._joined.values():
            joined.outbox.put_nowait(Finished())
        end = time.monotonic() + BEAT_SECONDS
        while self._joined and time.monotonic() < end:
            await asyncio.sleep(0.05)


def shared_config(config: Config) -> dict[str, str]:
    """Returns a digest of each value of the configuration that all nodes share, by its key: each rank acts on them."""
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
        for key, value in _leaves("", dump(config))
    }


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if key in _OWN:
        return
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, part in value.items():
        yield from _leaves(f"{key}.{name}" if key else name, part)
