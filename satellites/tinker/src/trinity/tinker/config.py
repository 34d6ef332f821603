"""The YAML of `trinity tinker`: one base model, the tenants that train and sample adapters, and what each may use."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from trinity.config.document import line_of, read_document, read_text
from trinity.config.errors import ConfigError, Problem
from trinity.config.load import problems_of
from trinity.config.schema.base import AnyPath, FolderName, LocalPath, PositiveFloat, Section, SmallInt, Tokens

_TENANT = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]


class TinkerConfig(Section):
    """Every key of the YAML."""

    name: FolderName = Field("tinker", description="Name of the service, of its folder below checkpoint_root_dir")
    checkpoint_root_dir: LocalPath = Field("./checkpoints", description="Folder of folders of services and runs")
    model_path: AnyPath = Field(description="Folder or hub name of the base model")
    base_model: str = Field("", description="Name of the base model for clients; empty: model_path")
    tenants: Annotated[list[_TENANT], Field(min_length=1, max_length=1000)] = Field(
        description="Names of the tenants; each gets a file with a key"
    )
    address: Literal["127.0.0.1", "::1", "0.0.0.0", "::"] = Field("127.0.0.1", description="Address of the HTTP server")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(8090, description="Port of the HTTP server")
    max_length: Tokens = Field(4096, description="Most tokens of a sequence")
    max_models: SmallInt = Field(32, description="Models that a tenant may have, in sessions that have not ended")
    max_saves: SmallInt = Field(256, description="States and adapters that a tenant may have saved under a name")
    session_minutes: PositiveFloat = Field(
        120.0, description="Minutes without a sign of a client, after which its session ends"
    )
    max_rank: SmallInt = Field(128, description="Largest rank of an adapter")
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Of the base model; adapters train in float32"
    )
    micro_tokens: Tokens = Field(16384, description="Tokens of a forward pass, with padding")
    share_passes: bool | None = Field(
        None, description="Compute waiting passes of several models at once; not equal bit for bit. By default on GPUs"
    )
    snapshot_commands: SmallInt = Field(
        64,
        description="Commands from one snapshot of all tenants to the next, at least; snapshots take 5 % of the time",
    )
    waiting_commands: SmallInt = Field(1000, description="Commands of a tenant that may wait; more are refused for now")
    waiting_mib: SmallInt = Field(256, description="Most that they may take")
    log_gib: PositiveFloat = Field(4.0, description="Most that the log of commands may take; a full log refuses more")
    result_hours: PositiveFloat = Field(24.0, description="Hours for which results are kept")

    sampled_adapters: Annotated[int, Field(ge=0, le=1000)] = Field(
        8, description="Adapters that the explorer holds at a time, to sample; 0: there is no explorer, and no sampling"
    )
    sample_minutes: PositiveFloat = Field(10.0, description="Minutes after which a request for samples fails")
    sampler_devices: str = Field("", description="CUDA devices of the explorer, as in CUDA_VISIBLE_DEVICES; empty: all")
    sampler_gpu_gib: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Memory of a GPU that the explorer takes, which it may share with the executor; 0: nine tenths"
    )

    @property
    def folder(self) -> Path:
        return (Path(self.checkpoint_root_dir).expanduser() / "tinker" / self.name).absolute()


def load_tinker(path: str | Path, overrides: Sequence[str] = ()) -> TinkerConfig:
    """Reads the YAML, with `key=value` overrides on top. Raises ConfigError with every problem."""
    document, lines = read_document(read_text(path), str(path), overrides)
    try:
        config = TinkerConfig.model_validate(document)
    except ValidationError as error:
        raise ConfigError(str(path), [*problems_of(error, lines, TinkerConfig)]) from None
    if len(set(config.tenants)) < len(config.tenants):
        raise ConfigError(str(path), [Problem("tenants", "names a tenant twice", line_of("tenants", lines))])
    return config
