"""Numbers and places that follow from the configuration. State the bound, derive the size."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from trinity.config.algorithms import AlgorithmPlan, for_quantized, resolve
from trinity.config.schema import Config
from trinity.config.schema.algorithm import RolloutCorrectionConfig
from trinity.config.schema.buffer import ExperienceBufferConfig, TasksetConfig
from trinity.plugins.declarations import ALGORITHMS

# Of a prompt and of a response, where the YAML gives no length at all.
DEFAULT_TOKENS = 2048
# Sections that a stage may replace.
SECTIONS = ("algorithm", "data_processor", "buffer", "explorer", "trainer")


@dataclass(frozen=True)
class Lengths:
    """In tokens. prompt + response <= model."""

    model: int
    prompt: int
    response: int


_MOST_ADAPTERS = 16  # held by an engine, which keeps memory for each


@dataclass(frozen=True)
class Staleness:
    """When weights travel, and how old the weights that made a batch may be.

    Batch b (from 0, trained by optimizer step b + 1) may be started by weights of step `gate(b)` or newer. Weights are
    published at multiples of `interval`. The step that trains batch b updates weights of step b, hence staleness
    b - gate(b) <= interval - 1 + offset = `bound`. With S = bound at most (S + 1) batches of tasks are outstanding.
    """

    interval: int
    offset: int

    @property
    def bound(self) -> int:
        """S, in optimizer steps. 0 is the synchronous mode."""
        return self.interval - 1 + self.offset

    def gate(self, batch: int) -> int:
        """Lowest optimizer step whose weights may start the tasks of a batch."""
        return max(0, (batch - self.offset) // self.interval * self.interval)

    def open_batches(self, gate_step: int) -> int:
        """Batches, from the first, whose gates are met once gates up to `gate_step` are; that many may be fed."""
        return gate_step // self.interval * self.interval + self.interval + self.offset

    def publishes(self, step: int, last_step: int | None) -> bool:
        """Tells if the weights of a step become a version."""
        return step % self.interval == 0 or step == last_step


@dataclass(frozen=True)
class GpuSplit:
    """GPUs of a cluster. `total` 0: the YAML names none, and the machine decides.

    `shared`: the trainer's are those of the engines.
    """

    total: int
    explorer: int
    auxiliary: int
    trainer: int
    shared: bool = False


@dataclass(frozen=True)
class Plan:
    """Everything derived from one stage's Config."""

    config: Config
    algorithm: AlgorithmPlan
    lengths: Lengths
    staleness: Staleness

    @property
    def offline(self) -> bool:
        """Learns from what lies on disk, without explorers: a dataset, or an archive of experience."""
        return learns_from_disk(self.config)

    @property
    def groups_per_step(self) -> int:
        """P: groups (or, offline, rows) of one optimizer step."""
        buffer = self.config.buffer
        if self.algorithm.offline and not self.algorithm.of_pairs:
            return buffer.train_batch_size
        if not buffer.train_batch_size:
            return buffer.batch_size
        return (buffer.train_batch_size - self.experts_per_step) // self.config.algorithm.repeat_times

    @property
    def fewest_groups(self) -> int:
        """Groups that a step has at least: with explorer.over_rollout it need not wait for the others."""
        ratio = Fraction(str(self.config.explorer.over_rollout.ratio))  # 0.29 * 100 is less than 29
        return self.groups_per_step - int(ratio * self.groups_per_step)

    @property
    def experts_per_step(self) -> int:
        """Rows of an auxiliary buffer in every batch (sample_strategy mix)."""
        strategy = self.algorithm.sample_strategy
        if strategy.name != "mix":
            return 0
        buffer, repeat = self.config.buffer, self.config.algorithm.repeat_times
        if not buffer.train_batch_size:  # in addition to batch_size tasks
            ratio = strategy.args["expert_data_ratio"]
            return math.ceil(buffer.batch_size * repeat * ratio / (1 - ratio))
        return math.ceil(buffer.train_batch_size * strategy.args["expert_data_ratio"])

    @property
    def experiences_per_step(self) -> int:
        """Experiences (or rows) of one optimizer step, without those of auxiliary buffers."""
        single = self.algorithm.offline and not self.algorithm.of_pairs
        return self.groups_per_step * (1 if single else self.config.algorithm.repeat_times)

    @property
    def policy(self) -> str:
        """The policy that turns groups into batches: fifo, arrival or replay; `dataset` offline."""
        source = self.config.buffer.trainer_input.experience_buffer
        if self.offline:
            return "dataset"
        if source is not None and source.replay_buffer.enable:
            return "replay"
        return "arrival" if self.algorithm.by_arrival else "fifo"

    @property
    def experience_buffer(self) -> ExperienceBufferConfig:
        """The experience that the trainer reads; defaults if the YAML has none."""
        return self.config.buffer.trainer_input.experience_buffer or ExperienceBufferConfig()

    @property
    def outstanding_groups(self) -> int:
        """Tasks that are fed and not yet trained, at most."""
        return (self.staleness.bound + 1) * self.groups_per_step

    @property
    def adapters_held(self) -> int:
        """Slots of an engine for unmerged adapters: of each version that a running task may have begun with, and of
        the next one, which otherwise waits for the end of the oldest's requests."""
        return min(self.staleness.bound // self.staleness.interval + 2, _MOST_ADAPTERS)

    @property
    def gpus(self) -> "GpuSplit":
        """Shares the GPUs of the cluster that the YAML names between engines and trainer."""
        config = self.config
        total = config.cluster.gpus
        rollout = config.explorer.rollout_model
        explores = not self.offline and config.mode != "train"
        explorer = rollout.engine_num * rollout.tensor_parallel_size if explores else 0
        auxiliary = sum(m.gpus for m in config.explorer.auxiliary_models)
        trains = config.mode in ("both", "train")
        rest = max(0, total - explorer - auxiliary * explores) if trains else 0
        shared = trains and explorer > 0 and explorer + auxiliary == total
        rest = explorer if shared else rest
        return GpuSplit(
            total, explorer, auxiliary if explores else 0, min(rest, config.trainer.num_ranks or rest), shared
        )

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps if the YAML says; otherwise they follow from the length of the taskset."""
        return self.config.buffer.total_steps or self.config.trainer.total_steps

    def steps_for(self, rows: int) -> int:
        """Optimizer steps for a taskset of `rows` rows. A last batch that is not full is not trained."""
        return self.total_steps or rows * self.config.buffer.total_epochs // self.groups_per_step

    @property
    def job_dir(self) -> Path:
        """<root>/<project>/[group/]<name>, absolute."""
        config = self.config
        parts = [config.project, *([config.group] if config.group else []), *config.name.split("/")]
        return Path(config.checkpoint_root_dir).expanduser().absolute().joinpath(*parts)

    @property
    def micro_batch_tokens(self) -> int:
        """Most tokens of one micro-batch of the trainer; where the YAML does not say, a GPU may take more."""
        return max(self.config.trainer.max_token_len_per_gpu or 2 * self.lengths.model, self.lengths.model)

    @property
    def tasksets(self) -> list[TasksetConfig]:
        """Tasksets to train on, every one with a name."""
        source = self.config.buffer.explorer_input
        tasksets = [source.taskset] if source.taskset else source.tasksets
        return [_named(taskset, f"taskset_{index}") for index, taskset in enumerate(tasksets)]

    @property
    def eval_tasksets(self) -> list[TasksetConfig]:
        source = self.config.buffer.explorer_input
        return [_named(taskset, f"eval_taskset_{index}") for index, taskset in enumerate(source.eval_tasksets)]


def learns_from_disk(config: Config) -> bool:
    """Tells if a stage's experience is on disk: an offline algorithm, or mode train on a file or a database."""
    declared = ALGORITHMS.get(config.algorithm.algorithm_type)
    return (declared is not None and declared.offline) or _reads_disk(config)


def learns_from_pairs(config: Config) -> bool:
    """Tells if the experience on disk is preference pairs: dpo in mode train on a file or a database."""
    return config.algorithm.algorithm_type == "dpo" and _reads_disk(config)


def _reads_disk(config: Config) -> bool:
    source, tasks = config.buffer.trainer_input.experience_buffer, config.buffer.explorer_input
    if config.mode not in ("train", "train_node") or source is None:
        return False
    if source.storage_type is None:  # a path is an input where there are no tasks whose experience it could store
        return source.path is not None and tasks.taskset is None and not tasks.tasksets
    return source.storage_type in ("file", "sql")


def make_plan(config: Config) -> Plan:
    """The plan of a checked Config without stages."""
    plan = Plan(
        config=config,
        algorithm=resolve(config.algorithm),
        lengths=_lengths(config),
        staleness=Staleness(config.synchronizer.sync_interval, config.synchronizer.sync_offset),
    )
    plan = replace(plan, algorithm=_algorithm(plan))
    return replace(plan, staleness=_staleness(plan))


def _algorithm(plan: Plan) -> AlgorithmPlan:
    """Fills in the values that depend on other sections."""
    algorithm = plan.algorithm
    if learns_from_pairs(plan.config):
        algorithm = replace(algorithm, offline=True)
    if plan.config.explorer.rollout_model.quantized and algorithm.correction == RolloutCorrectionConfig():
        algorithm = replace(algorithm, correction=for_quantized(algorithm))
    return replace(algorithm, max_response_tokens=plan.lengths.response)


def _staleness(plan: Plan) -> Staleness:
    """The bound that a sync_style stands for; docs/staleness.md says why."""
    sync, interval = plan.config.synchronizer, plan.config.synchronizer.sync_interval
    if sync.sync_style == "fixed":
        return Staleness(interval, sync.sync_offset)
    ahead = sync.sync_offset + interval
    if sync.sync_style == "fully_async":
        ahead = max(ahead, plan.experience_buffer.capacity // plan.experiences_per_step - interval)
    return Staleness(interval, ahead)


def _lengths(config: Config) -> Lengths:
    model = config.model
    total, prompt, response = model.max_model_len, model.max_prompt_tokens, model.max_response_tokens
    if total is None:
        if prompt is None or response is None:
            if config.mode == "explore":
                return Lengths(0, 0, 0)  # the run it joins knows
            prompt, response = prompt or DEFAULT_TOKENS, response or DEFAULT_TOKENS
        return Lengths(prompt + response, prompt, response)
    if prompt is None and response is None:
        return Lengths(total, total - total // 2, total // 2)
    if response is None:
        assert prompt is not None
        return Lengths(total, prompt, total - prompt)
    return Lengths(total, prompt if prompt is not None else total - response, response)


def _named(taskset: TasksetConfig, name: str) -> TasksetConfig:
    return taskset if taskset.name else taskset.model_copy(update={"name": name})


def expand(config: Config) -> list[Config]:
    """Returns one Config per stage, named `name/stage_name`; the config itself if it has no stages.

    A section given in a stage replaces the inherited one whole. Every stage saves its last model for the next one.
    """
    if not config.stages:
        return [config]
    stages = []
    for stage in config.stages:
        changes: dict[str, object] = {key: getattr(stage, key) for key in SECTIONS if getattr(stage, key) is not None}
        changes["mode"] = stage.mode or config.mode
        changes["name"] = f"{config.name}/{stage.stage_name}"
        trainer = stage.trainer or config.trainer
        changes["trainer"] = trainer.model_copy(update={"save_hf_checkpoint": "last"})
        stages.append(config.model_copy(update={**changes, "stages": []}))
    return stages
