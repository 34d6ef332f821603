"""Settings of the buffer. Prefix TRINITY_BUFFER_."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from trinity.runtime.settings import ServiceSettings


class BufferSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="TRINITY_BUFFER_", extra="forbid", frozen=True)

    config_file: Path | None = Field(None, description="The run's YAML")
    stage: str = Field("", description="Stage of the YAML, if it has several")
    nats_url: str = Field("nats://127.0.0.1:4222", description="NATS with JetStream")
    nats_replicas: int = Field(1, ge=1, le=5, description="Replicas of streams and buckets; 3 on a cluster")
    log_gib: float = Field(16.0, gt=0, description="Most the experience log may take on the broker, in GiB")
    cache_mib: int = Field(256, ge=1, description="Payloads of the newest groups kept in memory, in MiB")
