"""The explorer as a process: engines that follow the run's weights, and tasks or an endpoint on them."""

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import structlog

from trinity.config.service import load_plan
from trinity.explorer.build import ExplorerBuilder
from trinity.explorer.chat import ChatTokenizer
from trinity.explorer.engine.folder import FolderFollower
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.rollout.account import keep
from trinity.explorer.rollout.leases import Leases
from trinity.explorer.rollout.loop import Progress, RolloutLoop
from trinity.explorer.rollout.toolbox import ExplorerTools
from trinity.explorer.running import Running
from trinity.explorer.servicer import ExplorerServicer
from trinity.explorer.serving import endpoint
from trinity.explorer.settings import ExplorerSettings
from trinity.explorer.types import EngineOptions
from trinity.explorer.weights.follower import WeightFollower
from trinity.explorer.weights.loader import cache_folder
from trinity.explorer.weights.member import Activity
from trinity.runtime import names, process, waits
from trinity.runtime.broker import connect, return_leases
from trinity.runtime.errors import InvalidInput, Unavailable
from trinity.runtime.gpu_use import GpuUse
from trinity.runtime.metrics import Gauge, sample, show

log = structlog.get_logger(__name__)

RUNNING = Gauge("trinity_explorer_requests_running", "Sequences that vLLM samples now", ["engine"])
WAITING = Gauge("trinity_explorer_requests_waiting", "Sequences in vLLM's queue", ["engine"])
KV_CACHE = Gauge("trinity_explorer_kv_cache_usage_ratio", "Used part of vLLM's key-value cache, 0 to 1", ["engine"])
GPU_USE = Gauge("trinity_explorer_gpu_use_ratio", "Use of each GPU of the explorer's machine, 0 to 1", ["gpu"])
TASKS = Gauge(
    "trinity_explorer_tasks",
    "Leased tasks: running, those of evaluations among them, or waiting for a provider",
    ["state"],
)

_HEALTH_SECONDS = 5.0
_RETURN_SECONDS = 5.0
_MOST_THREADS = 4096  # made as they are needed; more than the agents of any explorer
_UNRECORDABLE = (
    "is true, which needs TRINITY_EXPLORER_API_KEYS_FILE, and a run to store experience in: "
    "TRINITY_EXPLORER_SERVE_FOLDER must be empty"
)


class ExplorerService:
    name = "explorer"

    def __init__(self, settings: ExplorerSettings) -> None:
        self._settings = settings
        self._plan = load_plan(settings.config_file, settings.stage, settings.plugin_dirs)
        config = self._plan.config
        self.run_id = run_id = names.run_id(config.project, config.name, config.group)
        self.explorer_id = explorer_id = settings.name.replace("{host}", socket.gethostname()) or config.explorer.name
        self._build = ExplorerBuilder(self._plan, settings, explorer_id, run_id)
        listen, keys = settings.serve_listen, settings.api_keys_file
        self._records = config.explorer.record and bool(listen)
        if self._records and (keys is None or settings.serve_folder is not None):
            raise InvalidInput("explorer.record", _UNRECORDABLE)
        self._api_keys = endpoint.open_keys(listen, keys) if listen else None
        only_serves = bool(listen) and not self._records
        self._running = Running(explorer_id, run_id, self._build.limits(), only_serves)
        self._leases = Leases(settings.account_dir, explorer_id)
        self._gpus: GpuUse | None = None

    def register(self, server: grpc.aio.Server) -> list[str]:
        return [ExplorerServicer(self._running).add_to(server)]

    async def work(self, ready: asyncio.Event, address: str) -> None:
        process.guard_group()  # vLLM's processes would survive a kill of this one
        # Agents in threads wait for the gateway, whose own threads must not wait for theirs to end.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_MOST_THREADS))
        running = self._running
        if not running.only_serves:
            await self._return_leases()
        waits.phase("loads vLLM and the model")
        running.tokenizer = tokenizer = await asyncio.to_thread(ChatTokenizer, self._plan.config.model)
        options = self._build.engine_options(tokenizer.turn_end)
        running.pool = pool = await self._build.pool(options)
        self._gpus = GpuUse() if options.device == "cuda" else None
        listen, name = self._settings.serve_listen, self._plan.config.name
        bounds = self._build.bounds()
        serve = partial(endpoint.serve, pool, listen, self._api_keys, bounds, options.model, name, tokenizer.template)
        serve = partial(serve, self._build.parsers(), self._settings.serve_adapters)
        with closing(pool):
            if self._settings.serve_folder is not None and self._settings.serve_adapters:
                await self._run(asyncio.sleep(math.inf), asyncio.sleep(0), serve, ready)  # their base does not change
                return
            if self._settings.serve_folder is not None:
                unverified = self._plan.config.allow_unverified_checkpoint
                checkpoints = FolderFollower(self._settings.serve_folder, pool, unverified=unverified)
                await self._run(checkpoints.run(), checkpoints.first_loaded(), serve, ready)
                return
            activity = Activity(
                running.state, pool.tokens_per_second, lambda: pool.tokens_generated, self._keeps_weights
            )
            with cache_folder(self._settings.cache_dir, running.explorer_id) as cache:
                running.follower = follower = self._build.follower(options, pool, activity, address, cache)
                if running.only_serves:
                    await self._run(follower.run(), follower.gates.wait_for_step(0), serve, ready)
                else:
                    await self._explore(follower, options, pool, tokenizer, cache, ready)

    async def _return_leases(self) -> None:
        """Return what a dead process of this explorer held, before the engines take their time to load."""
        left = self._leases.take_over()
        if not left:
            return
        with contextlib.suppress(Unavailable):  # then these leases end by their time
            name = f"trinity-explorer-{self.explorer_id}"
            async with await connect(self._settings.nats_url, name, wait_seconds=_RETURN_SECONDS) as broker:
                await return_leases(broker, left)
                log.info("explorer.leases.returned", leases=len(left))

    def _keeps_weights(self) -> bool:
        progress, pool = self._running.progress, self._running.pool
        if pool is not None and pool.tries:
            return True
        return (progress.running_tasks if self._plan.config.reproducible else progress.evaluations) > 0

    async def _explore(
        self,
        follower: WeightFollower,
        options: EngineOptions,
        pool: EnginePool,
        tokenizer: ChatTokenizer,
        cache: Path,
        ready: asyncio.Event,
    ) -> None:
        running, keys = self._running, self._api_keys if self._records else None
        async with await connect(self._settings.nats_url, f"trinity-explorer-{running.explorer_id}") as broker:
            running.tools = tools = await self._build.tools(options, pool, tokenizer, keys)
            try:
                tools.older_versions = self._build.older(options, pool, follower, cache)
                tools.calls = self._build.calls(broker)
                if tools.gateway is not None:
                    tools.gateway.calls = tools.calls
                running.loop = loop = self._build.loop(broker, pool, tools, follower, running.progress, self._leases)
                work = partial(self._work_on_tasks, loop, tools)
                await self._run(follower.run(), follower.gates.wait_for_step(0), work, ready)
            finally:
                await tools.close()  # before NATS: the gateway stores its last recorded calls

    async def _work_on_tasks(self, loop: RolloutLoop, tools: ExplorerTools) -> None:
        if self._records and tools.gateway is not None:
            tools.gateway.start()
        folder = self._settings.account_dir
        if folder is None:
            await loop.run()
            return
        keeping = asyncio.create_task(keep(self._running.progress.account, folder, self._running.explorer_id))
        try:
            await loop.run()
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])

    async def _run(
        self,
        follows: Coroutine[Any, Any, None],
        first_weights: Coroutine[Any, Any, None],
        job: Callable[[], Coroutine[Any, Any, None]],
        ready: asyncio.Event,
    ) -> None:
        """Follow the weights, and start the job with the first good ones."""
        async with asyncio.TaskGroup() as group:
            group.create_task(follows)
            group.create_task(self._watch_health())
            if self._running.pool is not None:
                group.create_task(sample(partial(measure, self._running.pool, self._running.progress, self._gpus)))
            await self._until_weights(first_weights)
            ready.set()
            group.create_task(job())

    async def _until_weights(self, first_weights: Coroutine[Any, Any, None]) -> None:
        """Waits for the first weights. Raises Unavailable after synchronizer.sync_timeout."""
        limit = self._plan.config.synchronizer.sync_timeout
        folder = self._settings.serve_folder
        whom = "the trainer's first weights" if folder is None else f"a checkpoint in {folder}"
        waits.phase(f"waits for {whom}")
        try:
            with waits.waiting(whom, f"sync service at {self._settings.sync_address}", limit_seconds=limit):
                async with asyncio.timeout(limit):
                    await first_weights
        except TimeoutError:
            raise Unavailable(f"{whom} did not come within {limit:g} s (synchronizer.sync_timeout)") from None

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_SECONDS)
            for part in (self._running.pool, self._running.tools):
                if part is not None:
                    await part.check()

    async def drain(self, grace_seconds: float) -> None:
        await self._running.drain(max(0.0, grace_seconds - 1.0))


async def measure(pool: EnginePool, progress: Progress, gpus: GpuUse | None = None) -> None:
    """Set the gauges."""
    if gpus is not None:
        show(GPU_USE, {(str(index),): use for index, use in gpus.take().items()})
    for index, usage in enumerate(pool.usage()):
        RUNNING.labels(index).set(usage.running)
        WAITING.labels(index).set(usage.waiting)
        KV_CACHE.labels(index).set(usage.kv_cache_ratio)
    TASKS.labels("running").set(progress.running_tasks)
    TASKS.labels("evaluation").set(progress.evaluations)
    TASKS.labels("waiting_for_provider").set(progress.waiting_tasks)
