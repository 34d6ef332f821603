"""A further node of the trainer: joins the first one, and runs the ranks of this machine in each group it is given.

    join -> (waiting)* -> group -> the ranks train -> the stream ends -> join again, or finished

The ranks live as long as the stream: if it ends, or the first node is silent, the group is over on all machines.
"""

import asyncio
import contextlib
import subprocess
import time

import grpc.aio
import structlog

from trinity.config.service import load_plan
from trinity.runtime import rpc, waits
from trinity.runtime.errors import Unavailable
from trinity.runtime.process import interface_to
from trinity.runtime.settings import split_address
from trinity.runtime.waits import START_SECONDS
from trinity.trainer.build import run_id_of
from trinity.trainer.client import join_node
from trinity.trainer.process.nodes import (
    Finished,
    FromNode,
    Leaving,
    Node,
    RankEnded,
    RankGroup,
    Waiting,
    this_node,
)
from trinity.trainer.process.ranks import keep_spares, launch, ranks_of_node
from trinity.trainer.settings import TrainerSettings

log = structlog.get_logger(__name__)

_AGAIN_SECONDS = 1.0
_LOAD_SECONDS = 30.0  # of the ranks, from which spares should not take the processor
_TELL_SECONDS = 8.0
_KILL_SECONDS = 10.0


class NodeService:
    """The process of a further node."""

    name = "trainer"

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._plan = load_plan(settings.config_file, settings.stage, settings.plugin_dirs, needs_algorithm=True)
        self.run_id = run_id_of(self._plan)
        self._host, _ = split_address(settings.first_address, "first_address")
        self._outbox: asyncio.Queue[FromNode] = asyncio.Queue()
        self._children: list[subprocess.Popen[bytes]] = []
        self._ended = asyncio.Event()
        self._leaves = False

    def register(self, server: grpc.aio.Server) -> list[str]:
        return []

    async def work(self, ready: asyncio.Event, address: str) -> None:
        """Trains until the first node says that it is finished. Raises its refusal, or Unavailable if it stays away."""
        node = this_node(self._plan, self.run_id, self._settings.num_ranks, self._settings.device)
        whom, since, told = f"the first node at {self._settings.first_address}", time.monotonic(), False
        try:
            while not self._leaves:
                try:
                    if await self._attend(node, ready):
                        return
                    since, told = time.monotonic(), False
                except rpc.NO_ANSWER as error:
                    away = time.monotonic() - since
                    if away > START_SECONDS:
                        raise Unavailable(f"{whom} stays away for {START_SECONDS:g} s: {error}") from None
                    if away > _TELL_SECONDS and not told:
                        log.info(waits.WAITS, whom=whom, reason=str(error), limit_seconds=START_SECONDS)
                        told = True
                finally:
                    await self._end_ranks()
                await asyncio.sleep(_AGAIN_SECONDS)
        finally:
            self._ended.set()

    async def drain(self, grace_seconds: float) -> None:
        """Leaves: the first node saves a checkpoint and continues without this one."""
        self._leaves = True
        self._outbox.put_nowait(Leaving())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self._ended.wait()

    async def _attend(self, node: Node, ready: asyncio.Event) -> bool:
        """Is a node of one group. Returns True if the training is finished; False if the group is over."""
        self._outbox = asyncio.Queue()
        self._outbox.put_nowait(node)
        keep_spares(self._settings.num_ranks)  # they load while the nodes wait for each other
        silent_seconds = self._plan.config.cluster.node_timeout
        async with (
            rpc.channel(self._settings.first_address) as channel,
            contextlib.aclosing(join_node(channel, self._outbox, silent_seconds)) as messages,
        ):
            async for message in messages:
                match message:
                    case Waiting(text):
                        log.info(waits.WAITS, whom="the other nodes", reason=text, limit_seconds=None)
                    case RankGroup() as group:
                        log.info(waits.WENT_ON, whom="the other nodes")
                        self._start_ranks(group)
                        ready.set()
                    case Finished():
                        return True
        return False

    def _start_ranks(self, group: RankGroup) -> None:
        interface = self._plan.config.cluster.network_interface or interface_to(self._host)
        here, address = self._settings.num_ranks, f"{self._host}:{group.store_port}"
        ranks = ranks_of_node(group.first_rank, here, group.world_size, address, group.store_secret, interface)
        loop, outbox = asyncio.get_running_loop(), self._outbox

        def on_death(rank: int, code: int) -> None:
            loop.call_soon_threadsafe(outbox.put_nowait, RankEnded(rank, code))

        log.info("trainer.node.trains", first_rank=group.first_rank, ranks=group.world_size, interface=interface)
        self._children = launch(ranks, range(here), on_death, self._plan.config.cluster.node_timeout)
        loop.call_later(_LOAD_SECONDS, keep_spares, here)

    async def _end_ranks(self) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        end = time.monotonic() + _KILL_SECONDS
        while any(child.poll() is None for child in self._children) and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self._children = []
