"""Settings of the sync service. Prefix TRINITY_SYNC_."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from trinity.runtime.settings import NatsSettings


class SyncSettings(NatsSettings):
    model_config = SettingsConfigDict(env_prefix="TRINITY_SYNC_", extra="forbid", frozen=True)

    nats_replicas: int = Field(0, ge=0, le=5, description="Replicas of the KV buckets; 0: 3 in a cluster, else 1")
    lease_seconds: float = Field(
        15.0,
        gt=1,
        le=30,  # an explorer that starts again waits 40 s for the end of its old lease
        description="Time an explorer's lease lives without a report, in seconds; at most 30",
    )
    claim_seconds: float = Field(10.0, gt=1, description="Time a trainer's claim lives without renewal, in seconds")
    canary_seconds: float = Field(
        120.0, gt=0, description="Time an explorer gets to judge a version before another one is asked, in seconds"
    )
    job_folder: Path | None = Field(
        None, description="Folder of the only run's stage; versions in it are recorded relative to it, so it may move"
    )
