"""Serves the trainer's RPCs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import unquote

import grpc.aio

from trinity.api.trainer.v1 import trainer_pb2 as pb
from trinity.api.trainer.v1 import trainer_pb2_grpc
from trinity.runtime.errors import Conflict
from trinity.runtime.messages import to_message
from trinity.trainer import wire
from trinity.trainer.process.control import Control
from trinity.trainer.process.nodes import Nodes
from trinity.weights.checkpoints import checkpoint_folder

_POLL_SECONDS = 0.05


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """`nodes`: further machines may join; None for a trainer on one machine."""

    def __init__(self, control: Control, run: str, world_size: int, job_dir: Path, nodes: Nodes | None = None) -> None:
        self._control = control
        self._run = run
        self._world_size = world_size
        self._job_dir = job_dir
        self._nodes = nodes

    def add_to(self, server: grpc.aio.Server) -> str:
        """Adds the service to a server; returns its full name."""
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(self, server)
        return str(pb.DESCRIPTOR.services_by_name["TrainerService"].full_name)

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.StatusResponse:
        progress = self._control.progress
        world_size = sum(ranks for _, ranks in progress.nodes) or self._world_size
        nodes = [pb.NodeStatus(name=name, ranks=ranks) for name, ranks in progress.nodes]
        given = {"run": self._run, "world_size": world_size, "nodes": nodes}
        return to_message(progress, pb.StatusResponse, **given, saved_step=None, ledger_sha256=None)

    async def Pause(self, request: pb.PauseRequest, context: grpc.aio.ServicerContext) -> pb.PauseResponse:
        self._refuse_if_finished()
        self._control.pause()
        await _until(lambda: self._control.progress.state in ("paused", "finished"))
        return pb.PauseResponse(step=self._control.progress.step)

    async def Resume(self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext) -> pb.ResumeResponse:
        self._control.resume()
        return pb.ResumeResponse()

    async def Checkpoint(
        self, request: pb.CheckpointRequest, context: grpc.aio.ServicerContext
    ) -> pb.CheckpointResponse:
        self._refuse_if_finished()
        before = self._control.progress

        def saved() -> bool:
            now = self._control.progress
            return now.has_saved_all or now.checkpoint_step > before.checkpoint_step

        if not before.has_saved_all:
            self._control.request_checkpoint()
            await _until(saved)
        step = self._control.progress.checkpoint_step
        path = str(checkpoint_folder(self._job_dir, step)) if step else ""
        return pb.CheckpointResponse(step=step, path=path)

    async def JoinNode(
        self, requests: AsyncIterator[pb.JoinNodeRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.JoinNodeResponse]:
        if self._nodes is None:
            raise Conflict("the trainer has one machine; set cluster.node_num in the run's YAML for more")
        host = unquote(str(context.peer())).partition(":")[2].rpartition(":")[0].strip("[]")
        messages = (wire.from_node(request) async for request in requests)
        async for message in self._nodes.join(messages, host):
            yield wire.to_node(message)

    def _refuse_if_finished(self) -> None:
        if self._control.progress.state == "finished":
            raise Conflict("the trainer has finished; there is no further step")


async def _until(holds: Callable[[], bool]) -> None:
    """Polls until the condition holds; the caller's deadline ends the wait."""
    while not holds():
        await asyncio.sleep(_POLL_SECONDS)
