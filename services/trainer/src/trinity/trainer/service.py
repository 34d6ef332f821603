"""Wires the trainer: the loop in a thread, the gRPC server, the other ranks as children."""

import asyncio
import os
import subprocess
from typing import Any, NoReturn

import grpc.aio
import structlog

from trinity.config.service import load_plan
from trinity.runtime import log_stream, tracing
from trinity.runtime.errors import UNEXPECTED, TrinityError
from trinity.trainer.build import run_id_of, train
from trinity.trainer.process.control import Control
from trinity.trainer.process.ranks import launch_others, ranks_from_environment
from trinity.trainer.servicer import TrainerServicer
from trinity.trainer.settings import TrainerSettings

log = structlog.get_logger(__name__)


# A failure mostly ends all ranks. Rank 0 has this time to report its error.
_ERROR_SECONDS = 2.0
# Results of rank 0 that no other rank's death causes: no error, or an error that torch does not raise.
_OWN_END = (type(None), TrinityError, OSError, *UNEXPECTED)


class TrainerService:
    name = "trainer"

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._plan = load_plan(settings.config_file, settings.stage, settings.plugin_dirs, needs_algorithm=True)
        self.run_id = run_id_of(self._plan)
        self.control = Control()
        self.ranks = ranks_from_environment(settings.num_ranks)
        self._children: list[subprocess.Popen[bytes]] = []
        self._training: asyncio.Future[None] | None = None

    def register(self, server: grpc.aio.Server) -> list[str]:
        servicer = TrainerServicer(self.control, self.run_id, self.ranks.world_size, self._plan.job_dir)
        return [servicer.add_to(server)]

    async def work(self, ready: asyncio.Event, address: str) -> None:
        loop = asyncio.get_running_loop()
        died: asyncio.Future[str] = loop.create_future()

        def on_death(rank: int, code: int) -> None:
            def note() -> None:
                if not self.control.stopping and not died.done():
                    died.set_result(f"rank {rank} ended with code {code}; see its log")

            loop.call_soon_threadsafe(note)

        self._children = launch_others(self.ranks, on_death)
        self.control.on_loaded = lambda: loop.call_soon_threadsafe(ready.set)
        self._training = loop.run_in_executor(None, train, self._plan, self._settings, self.ranks, self.control)
        ends: list[asyncio.Future[Any]] = [self._training, died]
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
