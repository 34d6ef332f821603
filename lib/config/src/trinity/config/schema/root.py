"""The whole document."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr

from trinity.config.schema.algorithm import AlgorithmConfig
from trinity.config.schema.base import (
    FolderName,
    FolderPath,
    LocalPath,
    OptionalFolderPath,
    PositiveFloat,
    PositiveInt,
    Section,
)
from trinity.config.schema.buffer import BufferConfig
from trinity.config.schema.explorer import ExplorerConfig, SynchronizerConfig
from trinity.config.schema.model import ClusterConfig, ModelConfig
from trinity.config.schema.pipeline import DataProcessorConfig
from trinity.config.schema.trainer import TrainerConfig

# Files and folders of the job, which share a folder with its stages.
_OF_THE_JOB = ("bench", "identity", "log", "nats", "run", "slurm")


def _not_of_the_job(name: str) -> str:
    if name in _OF_THE_JOB or name.startswith((".", "global_step_")) or name.endswith((".json", ".keys")):
        raise ValueError("must be another name: the job folder has a file or folder with this name")
    return name


_StageName = Annotated[FolderName, AfterValidator(_not_of_the_job)]
Mode = Literal["both", "explore", "train", "train_node", "bench", "serve"]


class MonitorConfig(Section):
    """Two runs per job, `<name>_explorer` and `<name>_trainer`; the same lines are always in <job>/monitor/*.jsonl."""

    monitor_type: Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio", "none"] = Field(
        "tensorboard",
        description="tensorboard, or an installed wandb, mlflow, swanlab or trackio; none: only the job folder",
    )
    monitor_args: dict[str, Any] | None = Field(
        None,
        description="Kept in the job folder's config.json; keys are safer in the environment (WANDB_API_KEY, ...)",
    )
    detailed_stats: bool = Field(False, description="Evaluations with mean, max, min and std over tasks as well")
    metrics_mib: PositiveInt | None = Field(
        1024,
        description="Most of <job>/monitor/<role>.jsonl, and of a role's TensorBoard files, in MiB; then the older "
        "half of the lines, or the oldest files, go. Null: no limit",
    )
    experiences_mib: PositiveInt | None = Field(
        4096,
        description="Most of <job>/buffer/experience_buffer.jsonl, the text of trained experiences, in MiB; then its "
        "older half goes. Null: no limit",
    )
    log_mib: PositiveInt = Field(
        400,
        description="Most of a process's log in <job>/log, in MiB; then the oldest of its four files goes. What the "
        "process prints besides may take a quarter of that",
    )
    ui: bool = Field(
        False, description="`trinity run` on a terminal serves the run's pages on this machine (docs/ui.md)"
    )

    @property
    def metrics_bytes(self) -> int | None:
        return None if self.metrics_mib is None else self.metrics_mib * 2**20

    @property
    def experiences_bytes(self) -> int | None:
        return None if self.experiences_mib is None else self.experiences_mib * 2**20


class BudgetConfig(Section):
    """The largest cost of a run, with all its stages and restarts."""

    gpu_hours: PositiveFloat | None = Field(
        None, description="Hours of devices; then the run saves a checkpoint and ends. Null: no limit"
    )


class StageConfig(Section):
    """One stage of a run. A stage inherits a missing section whole, and replaces a given section whole."""

    stage_name: _StageName = Field(description="Becomes the last part of the stage's job folder")
    mode: Literal["both", "train"] | None = Field(None, description="As above")
    algorithm: AlgorithmConfig | None = Field(None, description="As above")
    data_processor: DataProcessorConfig | None = Field(None, description="As above")
    buffer: BufferConfig | None = Field(None, description="As above")
    explorer: ExplorerConfig | None = Field(None, description="As above")
    trainer: TrainerConfig | None = Field(None, description="As above")


class Config(Section):
    """A run."""

    mode: Mode = Field("both", description="What to start (docs/modes.md)")
    project: FolderPath = Field("Trinity-RFT", description="First part of the job folder")
    group: OptionalFolderPath = Field("", description="Second part, if given")
    name: FolderPath = Field("rft", description="Last part of the job folder")
    checkpoint_root_dir: LocalPath = Field("./checkpoints", description="Root of all job folders")
    continue_from_checkpoint: bool = Field(True, description="Resume from the job folder's checkpoints")
    allow_unverified_checkpoint: bool = Field(
        False,
        description="Load a checkpoint without manifest.json, or whose files differ from it (docs/trainer.md)",
    )
    reproducible: bool = Field(
        False,
        description="Equal runs of this YAML, bit for bit, with kills too (docs/reproducibility.md)",
    )
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    data_processor: DataProcessorConfig = Field(default_factory=DataProcessorConfig)
    buffer: BufferConfig = Field(default_factory=BufferConfig)
    explorer: ExplorerConfig = Field(default_factory=ExplorerConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    synchronizer: SynchronizerConfig = Field(default_factory=SynchronizerConfig)
    monitor: MonitorConfig = Field(default_factory=MonitorConfig)
    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    stages: list[StageConfig] = Field(default_factory=list, max_length=100, description="Run one after the other")

    _notices: tuple[str, ...] = PrivateAttr(())

    @property
    def notices(self) -> tuple[str, ...]:
        """Keys of the file that were taken, but not as they stand: old names, and what has no effect."""
        return self._notices

    def note(self, notices: Iterable[str]) -> None:
        self._notices = tuple(notices)
