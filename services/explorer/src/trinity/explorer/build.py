"""The parts of an explorer, built from the plan of its run and the settings of its process."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from trinity.config import Plan
from trinity.config.checks.players import plays_older
from trinity.config.checks.teacher import teachers
from trinity.config.experts import mixture_of
from trinity.config.memory import vocabulary_of
from trinity.config.schema.buffer import GenerationConfig
from trinity.config.schema.explorer import TrialConfig
from trinity.data.experience import Limits
from trinity.data.task_source import sampling_of
from trinity.data.templates import refuse_rewritten_history
from trinity.data.vision import image_rules
from trinity.explorer.chat import ChatTokenizer
from trinity.explorer.engine.auxiliary import AuxiliaryModels
from trinity.explorer.engine.devices import has_nccl, platform_of
from trinity.explorer.engine.older import OlderVersions
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.engine.trial import Trial
from trinity.explorer.environments.client import READS_NONE, EnvironmentClient
from trinity.explorer.journal.journal import Journals
from trinity.explorer.rollout import attempt
from trinity.explorer.rollout.leases import Leases
from trinity.explorer.rollout.loop import Progress, RolloutLoop
from trinity.explorer.rollout.toolbox import ExplorerTools
from trinity.explorer.serving.bounds import Bounds
from trinity.explorer.sessions.server import AgentGateway, OpenTo
from trinity.explorer.settings import ExplorerSettings
from trinity.explorer.types import EngineOptions
from trinity.explorer.weights.choice import ExactGates
from trinity.explorer.weights.follower import WeightFollower
from trinity.explorer.weights.loader import fetch_adapters
from trinity.explorer.weights.member import Activity, CollectiveMember
from trinity.plugins import satellites
from trinity.runtime.broker import Broker
from trinity.runtime.devices import choose
from trinity.runtime.errors import InvalidInput
from trinity.runtime.names import RunNames
from trinity.runtime.trust.keys import KeyFile
from trinity.weights.adapters import read_adapters
from trinity.weights.client import Membership
from trinity.weights.manifest import Manifest
from trinity.weights.stores.cache import WeightCache

log = structlog.get_logger(__name__)


class ExplorerBuilder:
    """Builds the parts of one explorer. Call the methods in their order."""

    def __init__(self, plan: Plan, settings: ExplorerSettings, explorer_id: str, run_id: str) -> None:
        self._plan, self._settings = plan, settings
        self._config, self._explorer = plan.config, plan.config.explorer
        self._explorer_id, self._run_id = explorer_id, run_id
        self._cards: list[str] = []  # GPUs of the auxiliary models

    def limits(self) -> Limits:
        path = self._config.model.model_path
        return Limits(
            self._plan.lengths.model,
            vocabulary_of(path),
            images=image_rules(path, self._config.model.images),
            reward=self._explorer.reward_bound,
            logprob=self._explorer.logprob_bound,
            mixture=mixture_of(path),
        )

    def bounds(self) -> Bounds:
        explorer = self._explorer
        return Bounds(explorer.request_completions, explorer.request_timeout, explorer.reward_bound)

    def engine_options(self, turn_end: int | None) -> EngineOptions:
        """`turn_end`: the token that ends a reply under the chat template."""
        import torch

        model = self._config.model
        slots, rank = self._adapters()
        device = choose(self._settings.device, "TRINITY_EXPLORER_DEVICE", torch.cuda.is_available())
        return EngineOptions.of(
            self._explorer.rollout_model,
            model=model.model_path,
            device=device,
            max_model_len=self._plan.lengths.model,
            trust_remote_code=model.trust_remote_code,
            gpu_memory_gib=self._settings.gpu_memory_gib,
            rope=model.rope,
            routes=self._config.algorithm.enable_router_replay,
            images=image_rules(model.model_path, model.images),
            turn_end=turn_end,
            adapters=slots,
            adapter_rank=rank,
            keeps_before=self._trial is not None,
            base_in_four_bits=model.in_four_bits and self._follows,
            reproducible=self._config.reproducible,
            top=self._plan.algorithm.teacher_top,
        )

    def _adapters(self) -> tuple[int, int]:
        """Slots for unmerged adapters, and the largest rank; 0 if the engines follow whole models, or merge adapters.

        The trained adapters get slots for several versions, older versions that play and served adapters one each.
        """
        served = [read_adapters(folder).rank for folder in self._settings.serve_adapters.values()]
        lora = self._config.model.lora
        if lora is None or lora.merged or not self._follows:
            return len(served), max(served, default=0)
        given = lora.path and lora.lora_rank is None
        rank = read_adapters(Path(lora.path or "").expanduser()).rank if given else lora.rank
        held = self._plan.adapters_held + self._explorer.older_versions.keep * plays_older(self._config)
        held += self._trial is not None
        return held + len(served), max([rank, *served])

    @property
    def _follows(self) -> bool:
        """True if the engines follow a run's versions, and not whole models of a folder."""
        return self._settings.serve_folder is None and self._config.mode != "bench"

    @property
    def _trial(self) -> TrialConfig | None:
        traffic = self._explorer.traffic
        return traffic.trial if traffic is not None and self._explorer.record and self._follows else None

    async def pool(self, options: EngineOptions) -> EnginePool:
        pool = await EnginePool.start(options, self._devices(options))
        pool.trial = Trial(self._trial, pool.loads) if self._trial is not None else None
        return pool

    def _devices(self, options: EngineOptions) -> list[str | None]:
        """CUDA_VISIBLE_DEVICES of each engine."""
        if options.device == "cpu":
            return [None]  # the engines of a YAML for GPUs would share the same cores
        rollout = self._explorer.rollout_model
        visible = self._settings.devices or os.environ.get("CUDA_VISIBLE_DEVICES", "")
        wanted = rollout.engine_num * rollout.tensor_parallel_size
        wanted += sum(model.gpus for model in self._explorer.auxiliary_models)
        cards = visible.split(",") if visible else [str(index) for index in range(wanted)]
        size = rollout.tensor_parallel_size
        self._cards = cards[rollout.engine_num * size :]
        return [",".join(cards[i * size : (i + 1) * size]) for i in range(rollout.engine_num)]

    def follower(
        self, options: EngineOptions, pool: EnginePool, activity: Activity, address: str, cache_folder: Path
    ) -> WeightFollower:
        """The follower of the run's weights. `address`: this explorer's gRPC address."""
        asked = self._settings.transports.split(",")
        stores, collective = [name for name in asked if name != "collective"], None
        transports = tuple(stores)
        if "collective" in asked and options.device == "cuda" and not has_nccl():
            log.warning("explorer.collective.no_nccl", advice="weights come by storage; install torch's build for CUDA")
        elif "collective" in asked and not (options.adapters or self._config.reproducible):
            # A broadcast does not wait for running tasks.
            timeout = self._config.synchronizer.collective_timeout
            collective = CollectiveMember(self._explorer_id, pool.enter_group, timeout)
            transports += ("collective-nccl" if options.device == "cuda" else "collective-gloo",)
        membership = Membership(
            run=self._run_id,
            explorer_id=self._explorer_id,
            address=address,
            base_model=options.model,
            dtype=options.precision,
            tensor_parallel_size=options.tensor_parallel_size,
            engines=len(pool.engines),
            transports=transports,
            platform=platform_of(options) if options.reproducible else "",
        )
        cache = WeightCache(cache_folder, self._run_id, stores, self._settings.nats_url)
        exact = ExactGates(enforced=self._config.reproducible)
        address, merges = self._settings.sync_address, not options.adapters
        return WeightFollower(address, membership, pool, cache, activity, exact, collective, merges)

    def older(
        self, options: EngineOptions, pool: EnginePool, follower: WeightFollower, cache_folder: Path
    ) -> OlderVersions | None:
        """Older versions that play seats; None if no taskset has such a seat."""
        if not plays_older(self._config):
            return None
        stores = [name for name in self._settings.transports.split(",") if name != "collective"]
        cache = WeightCache(cache_folder / "older", self._run_id, stores, self._settings.nats_url)

        older = self._explorer.older_versions

        def fetch(manifest: Manifest) -> tuple[dict[str, Any], str]:
            now = follower.step  # another engine may still read versions of the window before
            cache.keep_only({manifest.version, *older.before(now), *older.before(now - older.every * older.keep)})
            return fetch_adapters(cache, manifest, options.model)

        return OlderVersions(pool, follower.find, fetch, lambda: follower.step, older)

    async def tools(
        self, options: EngineOptions, pool: EnginePool, tokenizer: ChatTokenizer, keys: KeyFile | None = None
    ) -> ExplorerTools:
        """Start the auxiliary models and build the workflows' toolbox. `keys`: of an endpoint that records sessions."""
        refuse_rewritten_history(self._plan, tokenizer.history_problem)
        models = self._explorer.auxiliary_models
        auxiliary = await AuxiliaryModels.start(models, options, self._cards, teachers(self._config))
        given = self._explorer.environments
        environment = EnvironmentClient(
            self._settings.environment_address,
            [(one.name, one.address) for one in given if one.address != "attached"],
            self._explorer.environment_wait,
            [one.name for one in given if one.address == "attached"],
            options.images or READS_NONE,
            self._explorer.reward_bound,
        )
        lengths, model = self._plan.lengths, self._explorer.rollout_model
        rewrites = bool(tokenizer.history_problem)
        records = sampling_of(self._plan, GenerationConfig(), 1) if self._explorer.traffic is not None else None
        open_to = OpenTo(self._settings.serve_listen, keys, self._config.name, records) if keys is not None else None
        gateway = AgentGateway(
            pool,
            options.model,
            tokenizer.template,
            rewrites,
            self.parsers(),
            open_to,
            self._explorer.agent_wait,
            self.bounds(),
            options.images,
        )
        seed = model.seed if self._config.reproducible else None
        return ExplorerTools(
            pool, tokenizer, environment, auxiliary, lengths.prompt, lengths.model, gateway, seed, options.top
        )

    def parsers(self) -> list[str]:
        """Options of `vllm serve` that name its parsers of replies."""
        model = self._explorer.rollout_model
        options = ["--enable-auto-tool-choice", "--tool-call-parser", model.tool_call_parser]
        return [*options, "--reasoning-parser", model.reasoning_parser] if model.reasoning_parser else options

    def calls(self, broker: Broker) -> Any:
        """The recorded calls of the run, of which any explorer may get a task; None without trinity-traffic.

        Raises InvalidInput if this explorer should record some.
        """
        if traffic := satellites.find("traffic"):
            return traffic.open_calls(broker, RunNames(self._run_id), self._explorer_id, self.limits())
        if self._explorer.traffic is not None:
            raise InvalidInput("explorer.traffic", f"needs {satellites.missing('traffic')}")
        return None

    def loop(
        self,
        broker: Broker,
        pool: EnginePool,
        tools: ExplorerTools,
        follower: WeightFollower,
        progress: Progress,
        leases: Leases,
    ) -> RolloutLoop:
        names, mine, limits = RunNames(self._run_id), self._explorer_id, self.limits()
        usable = partial(
            follower.is_usable, most_stale=self._plan.algorithm.sample_strategy.args.get("staleness_limit")
        )
        # A reproducible run samples the same tokens again.
        keeps = self._explorer.durable_episodes and not self._config.reproducible
        flush = self._explorer.flush_tokens
        journals = Journals(broker, names, mine, limits, usable, follower.gates.reaches_step, flush, keeps)
        patience = attempt.Patience(self._explorer.dynamic_timeout, self._config.buffer.batch_size)
        explore = partial(
            attempt.explore, explorer_id=mine, tools=tools, limits=limits, journals=journals, patience=patience
        )
        slots = self._explorer.runner_per_model * len(pool.engines)
        gates, notify = follower.gates, follower.notify
        return RolloutLoop(broker, names, slots, explore, gates, notify, progress, journals.give_back, leases)
