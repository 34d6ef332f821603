"""Wiring of the executor: follows the log of commands, executes each one, and appends its result."""

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import structlog
import torch

from trinity.data.tenants import account
from trinity.data.tenants.log import Command, CommandLog, Result, Told
from trinity.runtime import waits
from trinity.runtime.broker import connect
from trinity.runtime.devices import choose
from trinity.runtime.metrics import Counter
from trinity.runtime.names import RunNames
from trinity.trainer.tenants.executor import Executor
from trinity.trainer.tenants.model import SharedModel
from trinity.trainer.tenants.queue import FairQueue
from trinity.trainer.tenants.settings import TenantsSettings
from trinity.trainer.tenants.states import States

log = structlog.get_logger(__name__)

COMMANDS = Counter("trinity_tenants_commands", "Commands executed, those after a restart again included", ["kind"])
SECONDS = Counter(
    "trinity_tenants_seconds", "Seconds of the device that those commands took; shared ones by their tokens", ["tenant"]
)

_SHARED, _TOKEN_BYTES = 64, 20  # commands of which passes are computed at once; bytes of a token in a pass
_GATHERED_SECONDS = 0.005
_HELD_BYTES, _FULL_SECONDS = 2**30, 0.1


class TenantsService:
    name = "tenants"

    def __init__(self, settings: TenantsSettings) -> None:
        self._settings = settings
        self.run_id = settings.run
        self._ending, self._came = asyncio.Event(), asyncio.Event()

    def register(self, server: grpc.aio.Server) -> list[str]:
        return []

    async def work(self, ready: asyncio.Event, address: str) -> None:
        settings = self._settings
        executor = await asyncio.to_thread(self._load)
        async with await connect(settings.nats_url, "trinity-tenants") as broker:
            commands = CommandLog(broker, RunNames(settings.run))
            await commands.open(int(settings.log_gib * 2**30), settings.result_hours * 3600)
            executor.results, told = await commands.told(executor.results)
            most, most_bytes = (_SHARED, settings.micro_tokens * _TOKEN_BYTES) if executor.shares else (1, 0)
            queue = FairQueue(executor.position, executor.executed, most, most_bytes)
            ready.set()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(account.keep(executor.account, account.path_of(settings.folder, self.name)))
                tasks.create_task(self._read(commands.follow(executor.position), queue))
                tasks.create_task(self._work(executor, commands, queue, told))

    async def _read(self, commands: AsyncIterator[Command], queue: FairQueue) -> None:
        """Lets commands wait for ever. While too many do, further ones stay in the log."""
        async for command in commands:
            queue.add(command)
            self._came.set()
            while queue.bytes > _HELD_BYTES:
                await asyncio.sleep(_FULL_SECONDS)

    async def _work(self, executor: Executor, commands: CommandLog, queue: FairQueue, told: dict[int, Told]) -> None:
        """Executes commands for ever. The result of one that is `told` is not stored again, and its seconds count."""
        last_snapshot = executor.commands
        while True:
            await self._next(executor, queue)
            several = queue.take()
            found = await asyncio.to_thread(self._execute, executor, several)
            for command, result in zip(several, found, strict=True):
                if result is None:
                    continue
                known = told.pop(command.position, None)
                if known is None:
                    executor.results = await commands.add_result(result, command, executor.results)
                queue.executed(command.tenant, result.seconds)
                executor.account.add(command.tenant, command.kind, (known or result).seconds)
            if not told and executor.commands - last_snapshot >= self._settings.snapshot_commands:
                await asyncio.to_thread(executor.snapshot, *queue.reached())
                last_snapshot = executor.commands

    async def _next(self, executor: Executor, queue: FairQueue) -> None:
        """Waits for a command, and then a moment for those of other tenants with which it may share a pass."""
        waits = not queue
        while not queue:
            self._came.clear()
            await self._came.wait()
        if waits and executor.shares:
            await asyncio.sleep(_GATHERED_SECONDS)
        if self._ending.is_set():
            await asyncio.Event().wait()  # the host ends the process

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
