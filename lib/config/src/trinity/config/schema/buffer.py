"""buffer: where tasks come from, how many make a batch, and how long it goes on."""

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from trinity.config.schema.base import Section


class FormatConfig(Section):
    """Which columns of a row mean what."""

    prompt_type: Literal["messages", "plaintext"] = Field("messages", description="For SFT rows: chat or plain text")
    prompt_key: str = Field("prompt", description="Column of the prompt")
    response_key: str = Field("response", description="Column of the reference answer")
    messages_key: str = Field("message", description="Column of a whole conversation (SFT)")
    system_prompt: str | None = Field(None, description="System message of every task; null: the workflow's own")
    system_prompt_key: str | None = Field(None, description="Column of a system message, wins over system_prompt")
    reply_prefix: str | None = Field(None, description="Text the reply begins with")
    workflow_key: str = Field("", description="Column that names the row's workflow")
    reward_fn_key: str = Field("", description="Column that names the row's reward function")


class GenerationConfig(Section):
    """rollout_args: sampling of one taskset; null inherits from `model`."""

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    max_tokens: PositiveInt | None = Field(None, description="Longest response; null: model.max_response_tokens")
    stop: list[str] = Field(default_factory=list, description="Strings that end a response")


class SelectorConfig(Section):
    """In which order rows are taken."""

    selector_type: Literal["sequential", "shuffle", "random", "offline_easy2hard", "diff_based"] = Field(
        "sequential",
        description="sequential; shuffle: a new order each epoch; random: with replacement; offline_easy2hard: by "
        "feature_keys; diff_based: rows whose pass rate is nearest to a target",
    )
    seed: int = Field(42, description="Seed of the order")
    feature_keys: list[str] = Field(default_factory=list, description="Columns with numbers, the higher the easier")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Arguments of the selector")


class TasksetConfig(Section):
    """A dataset of tasks."""

    name: str = Field("", description="Name in logs and metrics; empty: taskset_<i>")
    storage_type: Literal["file"] = Field("file", description="How it is stored")
    path: str = Field(description="File (jsonl, json, parquet), folder, or hub name")
    subset_name: str | None = Field(None, description="Subset of a hub dataset or a folder inside `path`")
    split: str = Field("train", description="Split of a hub dataset or a file name inside `path`")
    format: FormatConfig = Field(default_factory=FormatConfig)
    rollout_args: GenerationConfig = Field(default_factory=GenerationConfig)
    default_workflow_type: str | None = Field(None, description="Workflow of rows that name none")
    default_reward_fn_type: str | None = Field(None, description="Reward function of rows that name none")
    workflow_args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the workflow")
    reward_fn_args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the reward function")
    data_selector: SelectorConfig = Field(default_factory=SelectorConfig, description="In which order rows are taken")
    repeat_times: PositiveInt = Field(1, description="Rollouts per task; for evaluation only")
    weight: PositiveFloat = Field(1.0, description="Share of this taskset among several, relative to the others'")


class ExplorerInputConfig(Section):
    """What the explorers work on."""

    taskset: TasksetConfig | None = Field(None, description="One taskset; or use tasksets")
    tasksets: list[TasksetConfig] = Field(default_factory=list, description="Several, mixed by their weights")
    eval_tasksets: list[TasksetConfig] = Field(default_factory=list, description="Evaluated every eval_interval")
    default_workflow_type: str | None = Field(None, description="Workflow of tasksets that name none")
    default_eval_workflow_type: str | None = Field(None, description="The same for eval_tasksets")
    default_reward_fn_type: str | None = Field(None, description="Reward function of tasksets that name none")


class ExperienceBufferConfig(Section):
    """What the trainer reads: the experience log, or a dataset of its own (SFT)."""

    name: str = Field("experience_buffer", description="Name in logs")
    storage_type: Literal["queue", "file"] | None = Field(None, description="queue: the experience log; file: `path`")
    path: str | None = Field(None, description="For file: dataset. The experience log needs none")
    subset_name: str | None = Field(None, description="Subset of a hub dataset or a folder inside `path`")
    split: str = Field("train", description="Split of a hub dataset or a file name inside `path`")
    capacity: PositiveInt = Field(10000, description="Experiences that fully_async may have outstanding")
    format: FormatConfig = Field(default_factory=FormatConfig)
    data_selector: SelectorConfig = Field(default_factory=SelectorConfig)
    max_read_timeout: float = Field(1800, gt=0, description="Longest wait for a batch before it is said, in seconds")


class TrainerInputConfig(Section):
    """Where the trainer reads."""

    experience_buffer: ExperienceBufferConfig | None = Field(None, description="null: the experience log")


class BufferConfig(Section):
    """Tasks and experience."""

    batch_size: PositiveInt = Field(1, description="Tasks per explore step")
    train_batch_size: NonNegativeInt = Field(0, description="Experiences per optimizer step; 0: batch_size * repeat")
    total_epochs: PositiveInt = Field(1, description="Passes over the tasks")
    total_steps: PositiveInt | None = Field(None, description="Optimizer steps; wins over total_epochs")
    explorer_input: ExplorerInputConfig = Field(default_factory=ExplorerInputConfig)
    trainer_input: TrainerInputConfig = Field(default_factory=TrainerInputConfig)
    save_experiences: bool = Field(True, description="Keep what was trained as text in <job>/buffer, for trinity view")
