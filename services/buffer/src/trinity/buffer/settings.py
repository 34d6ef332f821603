"""Settings of the buffer. Prefix TRINITY_BUFFER_."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from trinity.runtime.settings import NatsSettings


class BufferSettings(NatsSettings):
    model_config = SettingsConfigDict(env_prefix="TRINITY_BUFFER_", extra="forbid", frozen=True)

    config_file: Path | None = Field(None, description="The run's YAML")
    stage: str = Field("", description="Stage of the YAML, if it has several")
    environment_address: str = Field("", description="Address of the environment service, announced with the run")
    sync_address: str = Field(
        "", description="Address of the sync service, announced with the run, and asked for rollbacks by the guard"
    )
    trainer_address: str = Field("", description="Address of the trainer, announced with the run")
    nats_replicas: int = Field(0, ge=0, le=5, description="Replicas of streams and buckets; 0: 3 in a cluster, else 1")
    log_gib: float = Field(16.0, gt=0, description="Most the experience log may take on the broker, in GiB")
    log_keep_gib: float = Field(
        4.0, ge=0, description="Experience that no kept checkpoint needs goes when the log is longer than this, in GiB"
    )
    unreported_seconds: float = Field(
        30.0, gt=0.1, description="A task that no explorer has and that has no result is offered again after this time"
    )
    lines_mib: int = Field(64, ge=1, description="Most that the services' log lines may take on the broker, in MiB")
    lines_hours: float = Field(168.0, gt=0.1, description="Log lines leave the broker after this time, in hours")
    plugin_dirs: str = Field(
        "", description="Folders with the users' operators, sample strategies and selectors, separated as PATH is"
    )
    cache_mib: int = Field(256, ge=1, description="Most memory for groups that the trainer has not got yet, in MiB")
    read_only: bool = Field(False, description="Serve what the run has stored; feed, judge and write nothing")

    @property
    def sends_lines(self) -> bool:
        """A buffer that only reads writes no lines either."""
        return super().sends_lines and not self.read_only
