"""Wiring of the explorer: engines, weights, tasks."""

import asyncio
import os
import socket
from dataclasses import asdict
from pathlib import Path

import grpc.aio
import structlog

from trinity import plugins
from trinity.api.explorer.v1 import explorer_pb2, explorer_pb2_grpc
from trinity.config.memory import vocabulary_of
from trinity.config.service import load_plan
from trinity.data.experience import Group, Limits, Task, TaskKind
from trinity.explorer.chat import ChatTokenizer
from trinity.explorer.engine.auxiliary import AuxiliaryModels
from trinity.explorer.engine.devices import choose, has_nccl
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.environments.client import EnvironmentClient
from trinity.explorer.rollout import attempt
from trinity.explorer.rollout.task_queue import TaskQueue
from trinity.explorer.rollout.toolbox import ExplorerTools
from trinity.explorer.servicer import ExplorerServicer
from trinity.explorer.serving import endpoint
from trinity.explorer.serving.follow_folder import FolderFollower
from trinity.explorer.settings import ExplorerSettings
from trinity.explorer.types import EngineOptions
from trinity.explorer.weights.cache_folder import cache_folder
from trinity.explorer.weights.client import Membership
from trinity.explorer.weights.collective import CollectiveMember
from trinity.explorer.weights.follower import Activity, WeightFollower
from trinity.explorer.workflows.environments import refuse_rewritten_history
from trinity.runtime import names, process, tracing
from trinity.runtime.broker import Broker, Message, connect
from trinity.weights.stores.cache import WeightCache

log = structlog.get_logger(__name__)

# Deliveries beyond the allowed attempts after which a task counts as one that kills its explorers.
_SILENT_DEATHS = 5
_RETRY_DELAY_SECONDS = 1.0
# Longer than a request for tasks is open, so that what is handed back does not come straight back.
_HAND_BACK_SECONDS = 3.0
_HEALTH_SECONDS = 5.0


class ExplorerService:
    name = "explorer"

    def __init__(self, settings: ExplorerSettings) -> None:
        self._settings = settings
        self._plan = load_plan(settings.config_file, settings.stage)
        config = self._plan.config
        self.run_id = names.run_id(config.project, config.name, config.group)
        self.explorer_id = settings.name.format(host=socket.gethostname()) or config.explorer.name
        self.limits = Limits(self._plan.lengths.model, vocabulary_of(config.model.model_path))
        self.groups_stored = 0
        self.failed_attempts = 0
        self.draining = False
        self._waiting_for_room = False
        self._evaluations = 0
        self._servicer = ExplorerServicer(self)
        self.pool: EnginePool | None = None
        self._auxiliary: AuxiliaryModels | None = None
        self.tokenizer: ChatTokenizer | None = None
        self.follower: WeightFollower | None = None
        self.queues: list[TaskQueue] = []

    def register(self, server: grpc.aio.Server) -> list[str]:
        explorer_pb2_grpc.add_ExplorerServiceServicer_to_server(self._servicer, server)
        return [explorer_pb2.DESCRIPTOR.services_by_name["ExplorerService"].full_name]

    @property
    def running_tasks(self) -> int:
        return sum(queue.running for queue in self.queues)

    def state(self) -> str:
        """What the explorer does, in a word."""
        if self.follower is None or self.follower.version < 0:
            return "starting"
        if self.draining:
            return "draining"
        if self._settings.serve_listen:
            return "serving"
        if self._waiting_for_room:
            return "waiting for the log"
        if self.follower.updating:
            return "updating"
        if self._evaluations:
            return "evaluating"
        return "running" if self.running_tasks else "waiting"

    async def work(self, ready: asyncio.Event, address: str) -> None:
        config = self._plan.config
        process.guard_group()  # vLLM's processes do not notice that this one was killed
        options = self._engine_options()
        self.tokenizer = await asyncio.to_thread(ChatTokenizer, config.model)
        devices, rest = self._devices_of_engines(options)
        self.pool = await EnginePool.start(options, len(devices), devices)
        try:
            with cache_folder(self._settings.cache_dir, self.explorer_id) as cache:
                if self._settings.serve_folder is None:
                    self._follow(address, options, cache)
                if self._settings.serve_listen:
                    await self._serve_openai(options, ready)
                else:
                    await self._explore(options, rest, ready)
        finally:
            self.pool.close()

    async def _explore(self, options: EngineOptions, cards: list[str], ready: asyncio.Event) -> None:
        assert self.pool is not None and self.tokenizer is not None
        plugins.load([folder for folder in self._settings.plugin_dirs.split(os.pathsep) if folder])
        refuse_rewritten_history(self._plan, self.tokenizer.history_problem)
        self._auxiliary = auxiliary = await AuxiliaryModels.start(
            self._plan.config.explorer.auxiliary_models, options, cards
        )
        explorer = self._plan.config.explorer
        addressed = [(given.name, given.address) for given in explorer.environments if given.address != "attached"]
        environment = EnvironmentClient(self._settings.environment_address, addressed, explorer.environment_wait)
        lengths = self._plan.lengths
        self._tools = ExplorerTools(self.pool, self.tokenizer, environment, auxiliary, lengths.prompt, lengths.model)
        try:
            async with await connect(self._settings.nats_url, f"trinity-explorer-{self.explorer_id}") as broker:
                await self._serve(broker, ready)
        finally:
            await environment.close()
            auxiliary.close()

    async def _serve_openai(self, options: EngineOptions, ready: asyncio.Event) -> None:
        """The OpenAI endpoint, following a live run's versions or a job folder's checkpoints."""
        assert self.pool is not None
        model, name = self._plan.config.model, self._plan.config.name
        template = model.chat_template_path or model.custom_chat_template
        async with asyncio.TaskGroup() as group:
            if self._settings.serve_folder is not None:
                follower = FolderFollower(self._settings.serve_folder, self.pool)
                await follower.load_newest()
                group.create_task(follower.run())
            else:
                assert self.follower is not None
                group.create_task(self.follower.run())
                await self.follower.wait_for_step(0)
            group.create_task(self._watch_health())
            group.create_task(endpoint.serve(self.pool, self._settings.serve_listen, options.model, name, template))
            ready.set()

    def _engine_options(self) -> EngineOptions:
        config, rollout = self._plan.config, self._plan.config.explorer.rollout_model
        device = choose(self._settings.device)
        return EngineOptions(
            model=config.model.model_path,
            device=device,
            max_model_len=self._plan.lengths.model,
            dtype=rollout.dtype,
            tensor_parallel_size=rollout.tensor_parallel_size if device == "cuda" else 1,
            seed=rollout.seed,
            enforce_eager=rollout.enforce_eager,
            enable_prefix_caching=rollout.enable_prefix_caching,
            enable_chunked_prefill=rollout.enable_chunked_prefill,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            cpu_kvcache_gib=rollout.cpu_kvcache_gib,
            max_num_seqs=rollout.max_num_seqs,
            trust_remote_code=config.model.trust_remote_code,
        )

    def _devices_of_engines(self, options: EngineOptions) -> tuple[list[str | None], list[str]]:
        """CUDA_VISIBLE_DEVICES of each engine, and the cards left for the auxiliary models."""
        rollout = self._plan.config.explorer.rollout_model
        if options.device == "cpu":
            return [None], []  # the engines of a YAML for GPUs would share the same cores
        visible = self._settings.devices or os.environ.get("CUDA_VISIBLE_DEVICES", "")
        wanted = rollout.engine_num * rollout.tensor_parallel_size
        auxiliary = self._plan.config.explorer.auxiliary_models
        wanted += sum(model.engine_num * model.tensor_parallel_size for model in auxiliary)
        cards = visible.split(",") if visible else [str(index) for index in range(wanted)]
        size = rollout.tensor_parallel_size
        used = rollout.engine_num * size
        return [",".join(cards[i * size : (i + 1) * size]) for i in range(rollout.engine_num)], cards[used:]

    def _follow(self, address: str, options: EngineOptions, cache_root: Path) -> None:
        assert self.pool is not None
        pool = self.pool
        stores = [name for name in self._settings.transports.split(",") if name != "collective"]
        transports, collective = tuple(stores), None
        asked_for_group = len(stores) < len(self._settings.transports.split(","))
        if asked_for_group and options.device == "cuda" and not has_nccl():
            log.warning("explorer.collective.no_nccl", advice="weights come by storage; install torch's build for CUDA")
        elif asked_for_group:
            timeout = self._plan.config.synchronizer.collective_timeout
            collective = CollectiveMember(self.explorer_id, pool.enter_group, timeout)
            transports += ("collective-nccl" if options.device == "cuda" else "collective-gloo",)
        membership = Membership(
            run=self.run_id,
            explorer_id=self.explorer_id,
            address=address,
            base_model=options.model,
            dtype=options.engine_dtype,
            tensor_parallel_size=options.tensor_parallel_size,
            engines=len(pool.engines),
            transports=transports,
        )
        activity = Activity(
            state=self.state,
            tokens_per_second=pool.tokens_per_second,
            tokens_generated=lambda: pool.tokens_generated,
            busy_with_evaluation=lambda: self._evaluations > 0,
        )
        cache = WeightCache(cache_root, self.run_id, stores, self._settings.nats_url)
        self.follower = WeightFollower(self._settings.sync_address, membership, pool, cache, activity, collective)

    async def _serve(self, broker: Broker, ready: asyncio.Event) -> None:
        assert self.follower is not None and self.pool is not None
        run, follower = names.RunNames(self.run_id), self.follower
        config = self._plan.config.explorer
        slots = config.runner_per_model * len(self.pool.engines)

        async def work(task: Task, message: Message) -> None:
            await self._attempt(broker, run, task, message)

        self.queues = [
            TaskQueue(broker, stream, slots, work, lambda: follower.falls_short)
            for stream in (run.evaluation_tasks_stream, run.tasks_stream)
        ]
        async with asyncio.TaskGroup() as group:
            group.create_task(follower.run())
            group.create_task(self._watch_health())
            await follower.wait_for_step(0)
            ready.set()
            for queue in self.queues:
                group.create_task(queue.run())

    async def _watch_health(self) -> None:
        assert self.pool is not None
        while True:
            await asyncio.sleep(_HEALTH_SECONDS)
            await self.pool.check()
            if self._auxiliary is not None:
                await self._auxiliary.check()

    async def _attempt(self, broker: Broker, run: names.RunNames, task: Task, message: Message) -> None:
        assert self.follower is not None
        if not await self.follower.reaches_step(task.gate_step):
            log.warning("explorer.task.handed_back", task=task.task_id, gate_step=task.gate_step, reason="no weights")
            await message.retry(_HAND_BACK_SECONDS)
            return
        evaluation = task.kind is TaskKind.EVALUATION
        self._evaluations += evaluation
        await self.follower.notify()
        try:
            with tracing.span("task.attempt", parent=tracing.extract(message.headers)):
                if message.deliveries > task.max_attempts + _SILENT_DEATHS:
                    outcome: attempt.Outcome = attempt.lease_lost(task, message.deliveries, self.explorer_id)
                else:
                    outcome = await attempt.explore(
                        task, message.deliveries, self.explorer_id, self._tools, self.limits
                    )
                receipt = await attempt.store(broker, run, outcome, self._note_room)
                if isinstance(outcome, Group):
                    told = {"task": task.task_id, "ordinal": task.ordinal, "kind": str(task.kind), **asdict(receipt)}
                    log.debug("explorer.group.stored", **told)
        finally:
            self._evaluations -= evaluation
            await self.follower.notify()
        if isinstance(outcome, Group):
            self.groups_stored += 1
            await message.ack()
            return
        self.failed_attempts += 1
        if outcome.final:
            await message.ack()
        else:
            await message.retry(_RETRY_DELAY_SECONDS * message.deliveries)

    def _note_room(self, waiting: bool) -> None:
        self._waiting_for_room = waiting

    async def drain(self, grace_seconds: float) -> None:
        await self.drain_tasks(max(0.0, grace_seconds - 1.0))
        if self.follower is not None:
            await self.follower.leave()

    async def drain_tasks(self, grace_seconds: float) -> tuple[int, int]:
        """(finished, handed back)."""
        self.draining = True
        finished = await asyncio.gather(*(queue.drain(grace_seconds) for queue in self.queues))
        handed_back = sum(queue.handed_back for queue in self.queues)
        log.info("explorer.drained", finished=sum(finished), handed_back=handed_back)
        return sum(finished), handed_back
