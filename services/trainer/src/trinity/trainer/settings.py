"""Settings of the trainer. Prefix TRINITY_TRAINER_."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from trinity.runtime.settings import NatsSettings


class TrainerSettings(NatsSettings):
    model_config = SettingsConfigDict(env_prefix="TRINITY_TRAINER_", extra="forbid", frozen=True)

    config_file: Path | None = Field(None, description="The run's YAML")
    stage: str = Field("", description="Stage of the YAML, if it has several")
    plugin_dirs: str = Field("", description="Folders with the users' algorithms, separated as PATH is")
    buffer_address: str = Field("127.0.0.1:7001", description="gRPC address of the buffer")
    sync_address: str = Field("127.0.0.1:7004", description="gRPC address of the sync service")
    weights_dir: Path | None = Field(
        None,
        description="Folder of weight versions; default <job folder>/weights, with sync_method memory one in /dev/shm",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where training runs")
    collective_host: str = Field(
        "", description="Name of this host for members of the collective group; empty: as seen by the sync service"
    )
    num_ranks: int = Field(
        1, ge=1, description="Training processes of this machine, unless a launcher such as torchrun sets them"
    )
    first_address: str = Field(
        "",
        description="gRPC address of the trainer on its first machine, which this process joins with its ranks as a "
        "further node; empty: this is the first one",
    )
    gpu_memory_gib: float = Field(0, ge=0, description="Memory that a rank may take of its GPU, in GiB; 0: all of it")
    threads: int = Field(0, ge=0, description="CPU threads of each rank; 0: the cores, shared by the ranks")
    replay_folder: Path | None = Field(None, description="Train steps again into this folder, for comparison only")
    replay_from: int = Field(1, ge=1, description="First step of the replay; it begins at the checkpoint before it")
    replay_bad_step: int = Field(0, ge=0, description="Train this bad step's stored batch into replay_folder; 0: none")
    replay_to: int = Field(1, ge=1, description="Last step of the replay")
