"""Wiring of the executor: follows the log of commands, executes each one, and appends its result."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator

import grpc.aio
import structlog
import torch

from trinity.runtime import waits
from trinity.runtime.broker import connect
from trinity.runtime.devices import choose
from trinity.runtime.errors import Unavailable
from trinity.runtime.metrics import Counter
from trinity.runtime.names import RunNames
from trinity.tinker.commands import account
from trinity.tinker.commands.log import Command, CommandLog, Told
from trinity.tinker.executor.executor import Executor
from trinity.tinker.executor.model import SharedModel
from trinity.tinker.executor.queue import FairQueue
from trinity.tinker.executor.settings import TenantsSettings
from trinity.tinker.executor.states import States
from trinity.tinker.executor.turns import Executed, turn

log = structlog.get_logger(__name__)

COMMANDS = Counter("trinity_tenants_commands", "Commands executed, those after a restart again included", ["kind"])
SECONDS = Counter(
    "trinity_tenants_seconds", "Seconds of the device that those commands took; shared ones by their tokens", ["tenant"]
)

_SHARED, _TOKEN_BYTES = 64, 20  # commands of which passes are computed at once; bytes of a token in a pass
_GATHERED_SECONDS = 0.005
_HELD_BYTES, _FULL_SECONDS = 2**30, 0.1
_UNTOLD = 16  # turns whose results are not stored yet
_SNAPSHOT_SHARE = 0.05  # of the time, at most


class TenantsService:
    name = "tenants"

    def __init__(self, settings: TenantsSettings) -> None:
        self._settings = settings
        self.run_id = settings.run
        self._ending, self._came = asyncio.Event(), asyncio.Event()
        self._coming: deque[Command] = deque()
        self._executed: asyncio.Queue[Executed] = asyncio.Queue(_UNTOLD)
        self._waiting_bytes = 0

    def register(self, server: grpc.aio.Server) -> list[str]:
        return []

    async def work(self, ready: asyncio.Event, address: str) -> None:
        settings = self._settings
        executor = await asyncio.to_thread(self._load)
        async with await connect(settings.nats_url, "trinity-tenants") as broker:
            commands = CommandLog(broker, RunNames(settings.run))
            await commands.open(int(settings.log_gib * 2**30), settings.result_hours * 3600)
            executor.results, told = await commands.told(executor.results)
            ready.set()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(account.keep(executor.account, account.path_of(settings.folder, self.name)))
                tasks.create_task(self._read(commands.follow(executor.position)))
                tasks.create_task(self._tell(executor, commands, told))
                tasks.create_task(self._work(executor, commands, told))

    async def _read(self, commands: AsyncIterator[Command]) -> None:
        """Lets commands wait for ever. While too many do, further ones stay in the log."""
        async for command in commands:
            self._coming.append(command)
            self._waiting_bytes += len(command.body)
            self._came.set()
            while self._waiting_bytes > _HELD_BYTES:
                await asyncio.sleep(_FULL_SECONDS)

    async def _work(self, executor: Executor, commands: CommandLog, told: dict[int, Told]) -> None:
        """Executes commands for ever. A snapshot is written once all results are stored, and none are `told` from
        before."""
        settings, last_snapshot, not_before = self._settings, executor.commands, 0.0
        most, most_bytes = (_SHARED, settings.micro_tokens * _TOKEN_BYTES) if executor.shares else (1, 0)
        queue = FairQueue(executor.position, executor.executed, most, most_bytes)
        while True:
            await self._next(executor, queue)
            for_turn = turn(executor, queue)
            while (executed := await asyncio.to_thread(next, for_turn, None)) is not None:
                await self._executed.put(executed)
                self._take_over(executor, queue)
                await self._unless_ending()
            begin = time.monotonic()
            if begin < not_before or executor.commands - last_snapshot < settings.snapshot_commands:
                continue
            await self._executed.join()
            if not told:
                await commands.release(await asyncio.to_thread(executor.snapshot, *queue.reached()))
                last_snapshot = executor.commands
                not_before = time.monotonic() + (time.monotonic() - begin) / _SNAPSHOT_SHARE

    async def _tell(self, executor: Executor, commands: CommandLog, told: dict[int, Told]) -> None:
        """Stores results for ever, in order, each once what it saved is on disk. The result of a command that is `told`
        is not stored again, and its seconds count."""
        while True:
            for command, result in await self._executed.get():
                COMMANDS.labels(command.kind).inc()
                if result is None:
                    continue
                SECONDS.labels(command.tenant).inc(result.seconds)
                if (saving := executor.saving.pop(command.position, None)) is not None:
                    await asyncio.wrap_future(saving)
                known = told.pop(command.position, None)
                if known is None:
                    executor.results = await commands.add_result(result, command, executor.results)
                executor.account.add(command.tenant, command.kind, (known or result).seconds)
            self._executed.task_done()

    async def _next(self, executor: Executor, queue: FairQueue) -> None:
        """Waits for a command, and then a moment for those of other tenants with which it may share a pass."""
        self._take_over(executor, queue)
        waits = not queue
        while not queue:
            self._came.clear()
            await self._came.wait()
            self._take_over(executor, queue)
        if waits and executor.shares:
            await asyncio.sleep(_GATHERED_SECONDS)
            self._take_over(executor, queue)
        await self._unless_ending()

    def _take_over(self, executor: Executor, queue: FairQueue) -> None:
        """Adds what has come to the queue, which another thread uses during a turn."""
        while self._coming:
            queue.add(self._coming.popleft())
        self._waiting_bytes, executor.account.waiting = queue.bytes, queue.counts()

    async def _unless_ending(self) -> None:
        """Waits for ever if the host ends the process."""
        if self._ending.is_set():
            await asyncio.Event().wait()

    async def drain(self, grace_seconds: float) -> None:
        self._ending.set()

    def _load(self) -> Executor:
        settings = self._settings
        waits.phase("loads the model")
        device = choose(settings.device, "TRINITY_TENANTS_DEVICE", torch.cuda.is_available())
        if device == "cpu" and settings.threads:
            torch.set_num_threads(settings.threads)
        dtype: torch.dtype = getattr(torch, settings.dtype)
        try:
            model = SharedModel(settings.model_path, dtype, torch.device(device), settings.micro_tokens)
        except torch.OutOfMemoryError as error:
            problem = f"is {settings.model_path}, which does not fit: {error}"
            fix = "lower sampler_gpu_gib, or give the explorer other sampler_devices"
            raise Unavailable(f"model_path: {problem}; {fix}") from None
        states = States(settings.folder)
        states.check_base(settings.model_path, model.digest())
        shares = settings.share_passes if settings.share_passes is not None else device != "cpu"
        executor = Executor(model, states, shares=shares)
        executor.restore()
        return executor
