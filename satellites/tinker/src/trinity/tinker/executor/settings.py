"""Settings of the executor of tenants' commands. Prefix TRINITY_TENANTS_."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from trinity.runtime.settings import NatsSettings
from trinity.runtime.trust.roles import Role


class TenantsSettings(NatsSettings):
    model_config = SettingsConfigDict(env_prefix="TRINITY_TENANTS_", extra="forbid", frozen=True)
    role: ClassVar[str] = Role.TINKER

    run: str = Field(description="Id of the run whose log of commands is executed")
    model_path: str = Field(description="Folder or hub name of the base model")
    folder: Path = Field(description="Folder of the snapshots and of the states that tenants save")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Of the base model; adapters are in float32")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where training runs")
    threads: int = Field(0, ge=0, description="CPU threads; 0: all cores. A replay is equal bit for bit with as many")
    micro_tokens: int = Field(16384, ge=1, description="Tokens of a forward pass, with padding")
    share_passes: bool | None = Field(
        None, description="Compute waiting passes of several models at once; not equal bit for bit. By default on GPUs"
    )
    snapshot_commands: int = Field(64, ge=1, description="Commands from one snapshot to the next")
    log_gib: float = Field(4.0, gt=0, description="Most that the log of commands may take, and that of results")
    result_hours: float = Field(24.0, gt=0, description="Hours for which results are kept")
