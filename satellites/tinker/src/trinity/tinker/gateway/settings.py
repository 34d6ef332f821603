"""Settings of the gateway of tinker clients. Prefix TRINITY_TINKER_."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from trinity.runtime.settings import NatsSettings


class TinkerSettings(NatsSettings):
    model_config = SettingsConfigDict(env_prefix="TRINITY_TINKER_", extra="forbid", frozen=True)

    run: str = Field(description="Id of the run whose log gets the commands")
    serve_listen: str = Field("127.0.0.1:8090", description="Address of the HTTP server, host:port")
    keys_folder: Path = Field(description="Folder with a file of keys for each tenant, named as the tenant")
    base_model: str = Field(description="Name of the base model for clients")
    tokenizer: str = Field("", description="Folder or hub name of the tokenizer for clients; empty: base_model")
    vocabulary: int = Field(ge=1, description="Tokens of the base model's vocabulary")
    longest: int = Field(4096, ge=1, description="Most tokens of a sequence")
    session_minutes: float = Field(120.0, gt=0, description="Minutes without a sign of a client that end its session")
    most_models: int = Field(32, ge=1, description="Models that a tenant may make")
    most_saves: int = Field(256, ge=1, description="Named states and adapters that a tenant may have")
    most_rank: int = Field(128, ge=1, description="Largest rank of an adapter")
    log_gib: float = Field(4.0, gt=0, description="Most that the log of commands may take, and that of results")
    result_hours: float = Field(24.0, gt=0, description="Hours for which results are kept")
    waiting_commands: int = Field(1000, ge=1, description="Commands of a tenant that wait for execution; more get 429")
    waiting_mib: int = Field(256, ge=1, description="Most that they may take")
    sampler_address: str = Field(
        "", description="Address of the explorer that samples, host:port; empty: there is none"
    )
    sample_seconds: float = Field(600.0, gt=0, description="Seconds after which a request for samples fails")
    most_samples: int = Field(4096, ge=1, description="Sequences of a tenant that wait for samples; more get 429")
