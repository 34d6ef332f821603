"""The whole document."""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field, PrivateAttr

from trinity.config.schema.algorithm import AlgorithmConfig
from trinity.config.schema.base import Section
from trinity.config.schema.buffer import BufferConfig
from trinity.config.schema.explorer import ExplorerConfig, SynchronizerConfig
from trinity.config.schema.model import ClusterConfig, ModelConfig
from trinity.config.schema.monitor import MonitorConfig
from trinity.config.schema.pipeline import DataProcessorConfig
from trinity.config.schema.trainer import TrainerConfig

Mode = Literal["both", "explore", "train", "bench", "serve"]


class StageConfig(Section):
    """One stage of a run. A section left out is inherited whole; one that is given replaces it whole."""

    stage_name: str = Field(min_length=1, description="Becomes the last part of the stage's job folder")
    mode: Mode | None = Field(None, description="As above")
    algorithm: AlgorithmConfig | None = Field(None, description="As above")
    data_processor: DataProcessorConfig | None = Field(None, description="As above")
    buffer: BufferConfig | None = Field(None, description="As above")
    explorer: ExplorerConfig | None = Field(None, description="As above")
    trainer: TrainerConfig | None = Field(None, description="As above")


class Config(Section):
    """A run."""

    mode: Mode = Field(
        "both",
        description="both; train: everything but explorers; explore: an explorer that joins a run; bench: evaluate the "
        "checkpoints of a job; serve: an OpenAI-compatible endpoint that follows a job's weights",
    )
    project: str = Field("Trinity-RFT", min_length=1, description="First part of the job folder")
    group: str = Field("", description="Second part, if given")
    name: str = Field("rft", min_length=1, description="Last part of the job folder")
    checkpoint_root_dir: str = Field("./checkpoints", description="Root of all job folders")
    continue_from_checkpoint: bool = Field(True, description="Resume from what the job folder holds")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    data_processor: DataProcessorConfig = Field(default_factory=DataProcessorConfig)
    buffer: BufferConfig = Field(default_factory=BufferConfig)
    explorer: ExplorerConfig = Field(default_factory=ExplorerConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    synchronizer: SynchronizerConfig = Field(default_factory=SynchronizerConfig)
    monitor: MonitorConfig = Field(default_factory=MonitorConfig)
    stages: list[StageConfig] = Field(default_factory=list, description="Run one after the other")

    _notices: tuple[str, ...] = PrivateAttr(())

    @property
    def notices(self) -> tuple[str, ...]:
        """Keys of the file that were taken, but not as they stand: old names, and what has no effect."""
        return self._notices

    def note(self, notices: Iterable[str]) -> None:
        self._notices = tuple(notices)
