"""Wires the trainer: the loop in a thread, the gRPC server, other ranks as children, other machines as nodes."""

import asyncio
import contextlib
import faulthandler
import os
import subprocess
from typing import Any, NoReturn

import grpc.aio
import structlog

from trinity.config.service import load_plan
from trinity.runtime import log_stream, tracing
from trinity.runtime.errors import EXIT_AGAIN, UNEXPECTED, TrinityError
from trinity.runtime.process import interface_to
from trinity.runtime.settings import is_loopback, split_address
from trinity.trainer import rank_main
from trinity.trainer.build import load_code, run_id_of, train
from trinity.trainer.node import NodeService
from trinity.trainer.process.control import Control
from trinity.trainer.process.nodes import Nodes, this_node
from trinity.trainer.process.ranks import Ranks, keep_spares, launch_others, ranks_from_environment, ranks_of_node
from trinity.trainer.servicer import TrainerServicer
from trinity.trainer.settings import TrainerSettings

log = structlog.get_logger(__name__)


# A failure mostly ends all ranks. Rank 0 has this time to report its error.
_ERROR_SECONDS = 2.0
_LOOK_SECONDS = 0.5
_LOAD_SECONDS = 300.0  # least limit of a wait for ranks that load code and model, not all at the same speed
# Results of rank 0 that no other rank's death causes: no error, or an error that torch does not raise.
_OWN_END = (type(None), TrinityError, OSError, *UNEXPECTED)


def make_service(settings: TrainerSettings) -> "TrainerService | NodeService":
    """Returns the trainer's service, or that of a further node. A launcher's ranks above 0 train, and do not return."""
    if int(os.environ.get("RANK", "0")):
        rank_main.main()
    return NodeService(settings) if settings.first_address else TrainerService(settings)


class TrainerService:
    name = "trainer"
    _nodes: Nodes | None = None

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._plan = load_plan(settings.config_file, settings.stage, settings.plugin_dirs, needs_algorithm=True)
        self.run_id = run_id_of(self._plan)
        self.control = Control()
        self.ranks = Ranks(0, settings.num_ranks, 0)
        if self._plan.config.cluster.nodes == 1 or "RANK" in os.environ:
            self.ranks = ranks_from_environment(settings.num_ranks)
        self._children: list[subprocess.Popen[bytes]] = []
        self._training: asyncio.Future[None] | None = None

    def register(self, server: grpc.aio.Server) -> list[str]:
        cluster = self._plan.config.cluster
        if cluster.nodes > 1 and "RANK" not in os.environ and self._settings.replay_folder is None:
            first = this_node(self._plan, self.run_id, self._settings.num_ranks, self._settings.device)
            self._nodes = Nodes(first, cluster, lambda text: self.control.update(waiting_for=text))
        servicer = TrainerServicer(self.control, self.run_id, self.ranks.world_size, self._plan.job_dir, self._nodes)
        return [servicer.add_to(server)]

    async def work(self, ready: asyncio.Event, address: str) -> None:
        loop = asyncio.get_running_loop()
        died: asyncio.Future[str] = loop.create_future()
        hung_seconds = 0.0
        if self._nodes is not None:
            await self._form(self._nodes, address)
            hung_seconds = self._plan.config.cluster.node_timeout

        def on_death(rank: int, code: int) -> None:
            def note() -> None:
                if not self.control.stopping and not died.done():
                    died.set_result(f"rank {rank} ended with code {code}; see its log")

            loop.call_soon_threadsafe(note)

        self._children = launch_others(self.ranks, on_death, hung_seconds)
        self.control.on_loaded = lambda: loop.call_soon_threadsafe(ready.set)
        self._training = loop.run_in_executor(None, train, self._plan, self._settings, self.ranks, self.control)
        ends: list[asyncio.Future[Any]] = [self._training, died]
        if self.ranks.world_size > 1:
            self._watching = asyncio.create_task(self._watch_progress(died))
        if self._nodes is not None:
            await self._watch(self._nodes, ends)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            await asyncio.wait([self._training], timeout=_ERROR_SECONDS)
            if self.control.progress.state in ("finished", "stopped"):
                await asyncio.wait([self._training])  # it may publish a version for minutes, without other ranks
            error = self._training.exception() if self._training.done() else None
            if not self._training.done() or not isinstance(error, _OWN_END):
                error_text = f"; rank 0 raised {error!r}" if error is not None else ""
                log.error("service.failed", reason=died.result() + error_text)
                _exit_now(1)
        await self._training
        if self._nodes is not None and self.control.progress.state == "finished":
            await self._nodes.finish()

    async def _watch_progress(self, died: "asyncio.Future[str]") -> None:
        """Resolves `died` if the ranks' common work stands still: all may live and wait in collectives for each other.

        Looks are counted, so that the time in which this process is stopped does not count.
        """
        what = ""
        while not what:
            await asyncio.sleep(_LOOK_SECONDS)
            limit = self._plan.config.cluster.progress_timeout
            if self.control.progress.state == "starting":
                limit = max(limit, _LOAD_SECONDS)
            what = self.control.look(limit / _LOOK_SECONDS)
        with contextlib.suppress(OSError, ValueError):  # there is no standard error
            faulthandler.dump_traceback()
        if not died.done():
            died.set_result(f"{what} has stood still for {limit:g} s (cluster.progress_timeout): a rank hangs")

    async def _form(self, nodes: Nodes, address: str) -> None:
        """Waits for the nodes, and makes a group of their ranks and this machine's."""
        from trinity.weights.group_store import Store  # imports torch

        host, _ = split_address(address, "address")
        store = self._store = await asyncio.to_thread(Store.serve, host)  # serves as long as this process
        keep_spares(self._settings.num_ranks - 1)
        await asyncio.gather(nodes.wait(), asyncio.to_thread(load_code, self._settings))
        port = int(store.address.rpartition(":")[2])
        interface = self._plan.config.cluster.network_interface
        interface = interface or next((name for one in nodes.hosts() if (name := interface_to(one))), "")
        world_size = nodes.form(port, store.secret)
        here = self._settings.num_ranks
        local = host if is_loopback(host) else "127.0.0.1"
        self.ranks = ranks_of_node(0, here, world_size, f"{local}:{port}", store.secret, interface)
        self.control.update(nodes=nodes.members(), waiting_for="")

    async def _watch(self, nodes: Nodes, ends: "list[asyncio.Future[Any]]") -> None:
        """Returns once one of `ends` is done. Ends the process to form another group if the nodes change before."""
        await asyncio.wait([*ends, nodes.lost, nodes.changed], return_when=asyncio.FIRST_COMPLETED)
        if nodes.changed.done() and not any(end.done() for end in ends) and not nodes.lost.done():
            log.info("trainer.nodes.changed", reason=nodes.changed.result())
            self.control.stop(saves=True)
            await asyncio.wait([*ends, nodes.lost], return_when=asyncio.FIRST_COMPLETED)
        training = ends[0]
        if training.done() and isinstance(training.exception(), RuntimeError) and not nodes.lost.done():
            # What torch says of a lost connection comes before the loss of its node is known.
            await asyncio.wait([nodes.lost], timeout=self._plan.config.cluster.node_timeout)
        if self.control.progress.state == "finished":
            return
        if nodes.lost.done() and not (training.done() and isinstance(training.exception(), TrinityError)):
            loss = await nodes.loss()
            reason, code = loss.reason, EXIT_AGAIN if loss.order == 0 else 1
        elif nodes.changed.done() and training.done() and training.exception() is None:
            reason, code = nodes.changed.result(), EXIT_AGAIN
        else:
            return
        log.error("service.failed", reason=f"{reason}; the ranks start again, with the nodes that are there")
        _exit_now(code)

    async def drain(self, grace_seconds: float) -> None:
        """Lets the running step end. A restart trains it again from the same batch unless a checkpoint followed."""
        self.control.stop()
        if self._training is None:
            return
        _, running = await asyncio.wait([self._training], timeout=grace_seconds)
        if running:
            _exit_now(self._settings.exit_code_when_stopped)


def _exit_now(code: int) -> NoReturn:
    """Ends the process, since the loop's thread cannot be interrupted in a step or a collective."""
    tracing.shutdown()
    log_stream.stop()
    os._exit(code)
