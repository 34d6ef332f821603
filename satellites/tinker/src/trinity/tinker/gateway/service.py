"""Wiring of the gateway of tinker clients."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import grpc.aio
import structlog
import uvicorn

from trinity.runtime.broker import connect
from trinity.runtime.errors import InvalidInput
from trinity.runtime.names import RunNames
from trinity.runtime.settings import split_address
from trinity.tinker.commands.log import CommandLog
from trinity.tinker.gateway.app import Gateway
from trinity.tinker.gateway.client import SamplerClient
from trinity.tinker.gateway.journal import Journal
from trinity.tinker.gateway.quotas import Quotas
from trinity.tinker.gateway.results import Results
from trinity.tinker.gateway.saves import Saves
from trinity.tinker.gateway.settings import TinkerSettings
from trinity.tinker.gateway.tenants import TenantKeys

log = structlog.get_logger(__name__)

_HEADERS_BYTES = 64 * 1024  # of a message on NATS, besides the body
_RESULTS_SECONDS = 60.0  # until all results from before the start are read


class TinkerService:
    name = "tinker"

    def __init__(self, settings: TinkerSettings) -> None:
        self._settings = settings
        self.run_id = settings.run
        self._keys = TenantKeys(settings.keys_folder)

    def register(self, server: grpc.aio.Server) -> list[str]:
        return []

    async def work(self, ready: asyncio.Event, address: str) -> None:
        settings = self._settings
        async with contextlib.AsyncExitStack() as stack:
            broker = await stack.enter_async_context(await connect(settings.nats_url, "trinity-tinker"))
            commands = CommandLog(broker, RunNames(settings.run))
            await commands.open(int(settings.log_gib * 2**30), settings.result_hours * 3600)
            kept_seconds = settings.result_hours * 3600
            quotas = Quotas(settings.waiting_commands, settings.waiting_mib * 2**20, kept_seconds)
            results = Results(commands, kept_seconds, quotas)
            journal = Journal(commands, Saves(settings.most_saves, results.has_failed), quotas)
            await journal.catch_up()
            sampler = None
            if settings.sampler_address:
                sampler = SamplerClient(settings.sampler_address, settings.sample_seconds)
                stack.push_async_callback(sampler.close)
            most = broker.most_bytes - _HEADERS_BYTES
            gateway = Gateway(settings, self._keys, journal, results, commands, sampler, most)
            listening = _listen(settings.serve_listen)
            log.info("tinker.gateway.serving", address=f"http://{settings.serve_listen}", models=len(journal.models))
            server = _Server(uvicorn.Config(gateway.app(), log_level="warning", lifespan="off"))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(results.follow())
                with contextlib.suppress(TimeoutError):  # without them it would take failed saves for good ones
                    await asyncio.wait_for(results.known.wait(), _RESULTS_SECONDS)
                tasks.create_task(_serve(server, listening))
                tasks.create_task(gateway.end_silent())
                ready.set()

    async def drain(self, grace_seconds: float) -> None:
        pass  # a request that is cut off is repeated by its client


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves SIGTERM to the host, which then cancels this server."""
        yield


async def _serve(server: uvicorn.Server, listening: socket.socket) -> None:
    try:
        await server.serve([listening])
    except asyncio.CancelledError:
        server.force_exit = True
        await server.shutdown([listening])
        raise


def _listen(address: str) -> socket.socket:
    host, port = split_address(address, "TRINITY_TINKER_SERVE_LISTEN")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        problem = f"is {address}, which cannot be listened on: {error.strerror}; choose another port"
        raise InvalidInput("TRINITY_TINKER_SERVE_LISTEN", problem) from None
