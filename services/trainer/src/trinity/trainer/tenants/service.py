"""Wiring of the executor: follows the log of commands, executes each one, and appends its result."""

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import structlog
import torch

from trinity.data.tenants import account
from trinity.data.tenants.log import Command, CommandLog, Result
from trinity.runtime import waits
from trinity.runtime.broker import connect
from trinity.runtime.devices import choose
from trinity.runtime.metrics import Counter
from trinity.runtime.names import RunNames
from trinity.trainer.tenants.executor import Executor
from trinity.trainer.tenants.model import SharedModel
from trinity.trainer.tenants.settings import TenantsSettings
from trinity.trainer.tenants.states import States

log = structlog.get_logger(__name__)

COMMANDS = Counter("trinity_tenants_commands", "Commands executed, those after a restart again included", ["kind"])
SECONDS = Counter(
    "trinity_tenants_seconds", "Seconds of the device that those commands took; shared ones by their tokens", ["tenant"]
)

_SHARED = 64  # commands of which passes are computed at once
_GATHERED_SECONDS = 0.005  # for the next of several commands


class TenantsService:
    name = "tenants"

    def __init__(self, settings: TenantsSettings) -> None:
        self._settings = settings
        self.run_id = settings.run
        self._ending = asyncio.Event()

    def register(self, server: grpc.aio.Server) -> list[str]:
        return []

    async def work(self, ready: asyncio.Event, address: str) -> None:
        settings = self._settings
        executor = await asyncio.to_thread(self._load)
        async with await connect(settings.nats_url, "trinity-tenants") as broker:
            commands = CommandLog(broker, RunNames(settings.run))
            await commands.open(int(settings.log_gib * 2**30), settings.result_hours * 3600)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(account.keep(executor.account, account.path_of(settings.folder, self.name)))
                tasks.create_task(self._follow(executor, commands, ready))

    async def _follow(self, executor: Executor, commands: CommandLog, ready: asyncio.Event) -> None:
        """Executes commands for ever. A result that is stored already is not stored again; its seconds count."""
        executor.results, told = await commands.told(executor.results)
        ready.set()
        last_snapshot = executor.position
        most = _SHARED if executor.shares else 1
        async for several in waiting(commands.follow(executor.position), most):
            if self._ending.is_set():
                await asyncio.Event().wait()  # the host ends the process
            found = await asyncio.to_thread(self._execute, executor, several)
            for command, result in zip(several, found, strict=True):
                if result is None:
                    continue
                known = told.pop(command.position, None)
                if known is None:
                    executor.results = await commands.add_result(result, command, executor.results)
                executor.account.add(command.tenant, command.kind, (known or result).seconds)
            if not told and executor.position - last_snapshot >= self._settings.snapshot_commands:
                await asyncio.to_thread(executor.snapshot)
                last_snapshot = executor.position

    async def drain(self, grace_seconds: float) -> None:
        self._ending.set()

    def _execute(self, executor: Executor, several: list[Command]) -> list[Result | None]:
        found = executor.execute_all(several)
        for command, result in zip(several, found, strict=True):
            COMMANDS.labels(command.kind).inc()
            SECONDS.labels(command.tenant).inc(0.0 if result is None else result.seconds)
        return found

    def _load(self) -> Executor:
        settings = self._settings
        waits.phase("loads the model")
        device = choose(settings.device, "TRINITY_TENANTS_DEVICE", torch.cuda.is_available())
        if device == "cpu" and settings.threads:
            torch.set_num_threads(settings.threads)
        dtype: torch.dtype = getattr(torch, settings.dtype)
        model = SharedModel(settings.model_path, dtype, torch.device(device), settings.micro_tokens)
        shares = settings.share_passes if settings.share_passes is not None else device != "cpu"
        executor = Executor(model, States(settings.folder), shares=shares)
        executor.restore()
        return executor


async def waiting(commands: AsyncIterator[Command], most: int) -> AsyncIterator[list[Command]]:
    """Yields the commands that wait, in order, at most so many at a time."""
    coming: asyncio.Future[Command] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(commands))
            several, coming = [await coming], None
            while len(several) < most:
                coming = asyncio.ensure_future(anext(commands))
                if not (await asyncio.wait({coming}, timeout=_GATHERED_SECONDS))[0]:
                    break
                several, coming = [*several, coming.result()], None
            yield several
    finally:
        if coming is not None:
            coming.cancel()
