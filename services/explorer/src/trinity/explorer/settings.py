"""Settings of the explorer. Prefix TRINITY_EXPLORER_."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from trinity.runtime.settings import NatsSettings

_TRANSPORTS = ("folder", "s3", "jetstream", "collective")


class ExplorerSettings(NatsSettings):
    model_config = SettingsConfigDict(env_prefix="TRINITY_EXPLORER_", extra="forbid", frozen=True)

    config_file: Path | None = Field(None, description="The run's YAML")
    stage: str = Field("", description="Stage of the YAML, if it has several")
    name: str = Field("", description="Name in the run, unlike any other's; empty: the YAML's; {host}: this host")
    sync_address: str = Field("127.0.0.1:7004", description="gRPC address of the sync service")
    environment_address: str = Field("127.0.0.1:7002", description="gRPC address of the environment service")
    plugin_dirs: str = Field("", description="Folders with the users' workflows, separated as PATH is")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the engines run")
    serve_listen: str = Field("", description="Serve the OpenAI API at this host:port, and work on no tasks")
    serve_folder: Path | None = Field(None, description="Then follow this job folder's checkpoints, not a live run")
    serve_adapters: dict[str, Path] = Field(
        {}, description="JSON: names of further models to serve, each with a folder of peft's adapters for the base"
    )
    api_keys_file: Path | None = Field(
        None, description="File of the OpenAI API's keys, one a line; empty: no keys, allowed only on the loopback"
    )
    transports: str = Field(
        "folder,s3,jetstream,collective", description="Ways this explorer may get weights, separated by commas"
    )
    cache_dir: Path | None = Field(
        None, description="Where fetched weights are kept, twice a version's size; empty: a temporary folder"
    )
    gpu_memory_gib: float = Field(
        0,
        ge=0,
        description="Memory that an engine may take of each GPU, in GiB; 0: as the YAML says",
    )
    account_dir: Path | None = Field(
        None, description="Where its devices' seconds (`trinity cost`) and its leases are written; empty: nowhere"
    )
    devices: str = Field("", description="CUDA devices of this explorer, as in CUDA_VISIBLE_DEVICES; empty: all")

    @field_validator("transports")
    @classmethod
    def _known_transports(cls, value: str) -> str:
        names = [name.strip() for name in value.split(",") if name.strip()]
        unknown = [name for name in names if name not in _TRANSPORTS]
        if unknown or not names:
            raise ValueError(f"must name some of {', '.join(_TRANSPORTS)}; not {', '.join(unknown) or 'nothing'}")
        return ",".join(names)
