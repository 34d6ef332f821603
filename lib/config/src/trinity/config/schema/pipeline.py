"""data_processor: what happens to tasks before the run, and to experience before it is trained."""

from typing import Any

from pydantic import Field, field_validator

from trinity.config.schema.base import AnyPath, NonNegativeInt, OptionalLocalPath, OptionalPath, Section, SmallInt


class OperatorConfig(Section):
    """One operator of a pipeline."""

    name: str = Field(min_length=1, description="Registered name; plugins may add to them")
    args: dict[str, Any] = Field(default_factory=dict, description="Its arguments")


class ExperiencePipelineConfig(Section):
    """Every stored group goes through these operators, in order, before it may enter a batch."""

    operators: list[OperatorConfig] = Field(default_factory=list, description="Filters and changes of rewards")
    max_dropped_batches: NonNegativeInt = Field(
        32,
        description="The run ends when operators drop this many batches before the next one is full; 0: never",
    )
    input_save_path: OptionalPath | None = Field(None, description="Archive of the experience before the operators")


class TaskPipelineConfig(Section):
    """Rows of local tasksets are filtered and ordered before the run starts; docs/task_pipeline.md has the names."""

    operators: list[OperatorConfig] = Field(
        default_factory=list, description="Filters, applied in this order, and arguments of scores (<score>_score)"
    )
    inputs: list[AnyPath] = Field(
        default_factory=list,
        description="Files in place of the training tasksets' paths, one each for several tasksets",
    )
    output: OptionalLocalPath | None = Field(
        None,
        description="File for the result (.jsonl, .parquet) or a folder; null: buffer/tasks.jsonl in the job folder",
    )
    target_fields: list[str] = Field(
        default_factory=list, description="Columns of a row's text; empty: the taskset's format.prompt_key"
    )
    priority_weights: dict[str, float] = Field(
        default_factory=dict,
        description="Weights of difficulty, diversity, usage_frequency and quality, whose sum orders the rows, "
        "highest first",
    )
    top_k: int = Field(-1, ge=-1, le=1_000_000_000, description="Rows kept after ordering; -1: all")
    min_score: float | None = Field(None, description="Rows below this weighted sum are left out")
    num_process: SmallInt = Field(4, description="Processes for operators of data-juicer")


class DataProcessorConfig(Section):
    """Both pipelines."""

    experience_pipeline: ExperiencePipelineConfig = Field(
        default_factory=ExperiencePipelineConfig, description="null: no operators"
    )
    task_pipeline: TaskPipelineConfig | None = Field(None, description="null: tasks stay unchanged")

    @field_validator("experience_pipeline", mode="before")
    @classmethod
    def _null_is_none(cls, value: Any) -> Any:
        return {} if value is None else value
