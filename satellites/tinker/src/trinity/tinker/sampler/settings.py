"""Settings of the explorer that samples by tenants' adapters. Prefix TRINITY_SAMPLER_."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from trinity.runtime.settings import ServiceSettings
from trinity.runtime.trust.roles import Role


class SamplerSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="TRINITY_SAMPLER_", extra="forbid", frozen=True)
    role: ClassVar[str] = Role.TINKER

    run: str = Field("tinker", description="Id of the run whose tenants' adapters are sampled")
    model_path: str = Field(description="Folder or hub name of the base model")
    folder: Path = Field(description="Folder of the executor, which saves the adapters")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Of the base model and the adapters")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the engine runs")
    devices: str = Field("", description="CUDA devices of the engine, as in CUDA_VISIBLE_DEVICES; empty: all")
    gpu_memory_gib: float = Field(
        0, ge=0, description="Memory that the engine may take of a GPU, in GiB; 0: nine tenths"
    )
    longest: int = Field(4096, ge=2, description="Most tokens of a sequence, prompt and sampled ones together")
    most_adapters: int = Field(8, ge=1, description="Adapters that the engine holds at a time")
    most_rank: int = Field(128, ge=1, description="Largest rank of an adapter")
