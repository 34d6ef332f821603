"""buffer: where tasks come from, how many make a batch, and how long the run lasts."""

from typing import Any, Literal

from pydantic import Field

from trinity.config.schema.base import (
    AnyPath,
    DatasetPath,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    SmallInt,
    Temperature,
    Tokens,
    UrlPrefix,
)

DEFAULT_WORKFLOW = "simple_workflow"
DEFAULT_REWARD_FUNCTION = "math_reward"


class FormatConfig(Section):
    """The meaning of the columns of a row. `a.b` is the column, or `b` inside of column `a`."""

    prompt_type: Literal["messages", "plaintext"] = Field("messages", description="For SFT rows: chat or plain text")
    prompt_key: Name = Field("prompt", description="Column of the prompt; of the whole text (cpt)")
    response_key: Name = Field("response", description="Column of the reference answer, or of a list of right ones")
    messages_key: Name = Field("message", description="Column of a whole conversation (SFT)")
    chosen_key: Name = Field("chosen", description="Column of the preferred reply (dpo on a dataset)")
    rejected_key: Name = Field("rejected", description="Column of the other reply (dpo on a dataset)")
    image_key: Name | None = Field(None, description="Column of a task's images (docs/vision.md)")
    image_urls: list[UrlPrefix] = Field(default_factory=list, description="Beginnings of URLs that images may have")
    system_prompt: str | None = Field(None, description="System message of every task; null: the workflow's own")
    system_prompt_key: Name | None = Field(None, description="Column of a system message, wins over system_prompt")
    reply_prefix: str | None = Field(None, description="Text the reply of a single turn begins with")
    workflow_key: str = Field("", description="Column that names the row's workflow")
    reward_fn_key: str = Field("", description="Column that names the row's reward function, or veRL's data_source")


class GenerationConfig(Section):
    """rollout_args: sampling of one taskset; null inherits from `model`."""

    temperature: Temperature | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=10_000_000)
    max_tokens: Tokens | None = Field(None, description="Longest response; null: model.max_response_tokens")
    stop: list[Name] = Field(default_factory=list, description="Strings that end a response")


class SelectorConfig(Section):
    """The order in which rows are fed."""

    selector_type: str = Field(
        "sequential",
        description="shuffle: a new order each epoch; random: with replacement; offline_easy2hard: by feature_keys; "
        "diff_based: pass rate nearest to a target",
    )
    seed: Seed = Field(42, description="Seed of the order")
    feature_keys: list[str] = Field(default_factory=list, description="Columns with numbers, the higher the easier")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Arguments of the selector")


class TasksetConfig(Section):
    """A dataset of tasks."""

    name: str = Field("", description="Name in logs and metrics; empty: taskset_<i>")
    storage_type: Literal["file"] = Field("file", description="How it is stored")
    path: DatasetPath = Field(description="File (docs/compatibility.md), folder, or hub name")
    subset_name: str | None = Field(None, description="Subset of a hub dataset or a folder inside `path`")
    split: str = Field("train", description="Split of a hub dataset or a file name inside `path`")
    format: FormatConfig = Field(default_factory=FormatConfig)
    rollout_args: GenerationConfig = Field(default_factory=GenerationConfig)
    default_workflow_type: Name | None = Field(None, description="Workflow of rows that name none")
    default_reward_fn_type: Name | None = Field(None, description="Reward function of rows that name none")
    workflow_args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the workflow")
    reward_fn_args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the reward function")
    data_selector: SelectorConfig = Field(default_factory=SelectorConfig, description="The order of rows")
    repeat_times: SmallInt = Field(1, description="Rollouts per task; for evaluation only")
    weight: PositiveFloat = Field(1.0, description="Share of this taskset among several, relative to the others'")


class ExplorerInputConfig(Section):
    """The tasks of the explorers."""

    taskset: TasksetConfig | None = Field(None, description="One taskset; or use tasksets")
    tasksets: list[TasksetConfig] = Field(default_factory=list, description="Several, mixed by weight")
    eval_tasksets: list[TasksetConfig] = Field(default_factory=list, description="Evaluated every eval_interval")
    default_workflow_type: Name | None = Field(None, description="Workflow of tasksets that name none")
    default_eval_workflow_type: Name | None = Field(None, description="The same for eval_tasksets")
    default_reward_fn_type: Name | None = Field(None, description="Reward function of tasksets that name none")

    def by_key(self) -> list[tuple[str, TasksetConfig]]:
        """Yields every taskset with its key below this section."""
        named = [("taskset", self.taskset)] if self.taskset else []
        named += [(f"tasksets.{i}", t) for i, t in enumerate(self.tasksets)]
        return named + [(f"eval_tasksets.{i}", t) for i, t in enumerate(self.eval_tasksets)]

    def workflow_of(self, taskset: TasksetConfig, evaluated: bool = False, default: str = DEFAULT_WORKFLOW) -> str:
        """Workflow of the taskset's rows that name none. `evaluated`: it is one of eval_tasksets."""
        own = taskset.default_workflow_type or (evaluated and self.default_eval_workflow_type)
        return own or self.default_workflow_type or default

    def reward_of(self, taskset: TasksetConfig, default: str = DEFAULT_REWARD_FUNCTION) -> str:
        """Reward function of the taskset's rows that name none."""
        return taskset.default_reward_fn_type or self.default_reward_fn_type or default


class ReplayConfig(Section):
    """replay_buffer: batches by priority instead of by order, and groups that are used more than once."""

    enable: bool = Field(False, description="Choose the groups of a batch by priority")
    priority_fn: Literal["linear_decay", "linear_decay_use_count_control_randomization"] = Field(
        "linear_decay",
        description="Formulas: docs/experience.md",
    )
    priority_fn_args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the priority function")
    reuse_cooldown_time: NonNegativeFloat | None = Field(
        None, description="Seconds after which a used group may be used again; null: never"
    )


class ExperienceBufferConfig(Section):
    """The source of the trainer's batches: the experience log, or a dataset (SFT)."""

    name: str = Field("experience_buffer", description="Name in logs; the table of an SQL database")
    storage_type: Literal["queue", "file", "sql"] | None = Field(
        None,
        description="Of an offline algorithm: file or sql. With explorers: the log. null: by mode and tasks",
    )
    path: AnyPath | None = Field(
        None,
        description="Offline: the dataset, or an archive of experience. With explorers: the archive to write: "
        ".jsonl, .parquet, .db, sqlite:/// or postgresql:// URL",
    )
    subset_name: str | None = Field(None, description="Subset of a hub dataset or a folder inside `path`")
    split: str = Field("train", description="Split of a hub dataset or a file name inside `path`")
    capacity: PositiveInt = Field(
        10000, description="Experiences that fully_async may have outstanding, and that replay keeps"
    )
    format: FormatConfig = Field(default_factory=FormatConfig)
    data_selector: SelectorConfig = Field(default_factory=SelectorConfig)
    max_read_timeout: PositiveFloat = Field(
        1800, description="Longest wait for a whole batch, in seconds; then the trainer gets the stored groups"
    )
    replay_buffer: ReplayConfig = Field(default_factory=ReplayConfig, description="Priority and reuse")


class TrainerInputConfig(Section):
    """Sources of experience for the trainer."""

    experience_buffer: ExperienceBufferConfig | None = Field(None, description="null: the experience log")
    auxiliary_buffers: dict[str, ExperienceBufferConfig] = Field(
        default_factory=dict, description="Datasets mixed into batches by algorithm.sample_strategy, by name"
    )


class BufferConfig(Section):
    """Tasks and experience."""

    batch_size: PositiveInt = Field(1, description="Tasks per explore step")
    train_batch_size: NonNegativeInt = Field(0, description="Experiences per optimizer step; 0: batch_size * repeat")
    total_epochs: PositiveInt = Field(1, description="Passes over the tasks")
    total_steps: PositiveInt | None = Field(None, description="Optimizer steps; wins over total_epochs")
    explorer_input: ExplorerInputConfig = Field(default_factory=ExplorerInputConfig)
    trainer_input: TrainerInputConfig = Field(default_factory=TrainerInputConfig)
    save_experiences: bool = Field(
        True, description="Keep trained experiences as text in <job>/buffer, for trinity view"
    )
    save_token_values: bool = Field(
        True,
        description="Also keep, for each token, log-probability and entropy under the trainer, and the clip",
    )
