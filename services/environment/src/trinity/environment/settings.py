"""Settings of the environment service. Prefix TRINITY_ENVIRONMENT_."""

from pathlib import Path
from typing import Any

from pydantic import Field, Json
from pydantic_settings import SettingsConfigDict

from trinity.runtime.settings import NatsSettings


class EnvironmentSettings(NatsSettings):
    model_config = SettingsConfigDict(env_prefix="TRINITY_ENVIRONMENT_", extra="forbid", frozen=True)

    nats_url: str = Field("", description="NATS that gets the log lines; empty: none does")
    plugin_dirs: str = Field("", description="Folders with the users' reward functions, separated as PATH is")
    threads: int = Field(16, ge=1, description="Answers that each scorer may score at the same time")
    max_episodes: int = Field(2048, ge=1, description="Episodes of all environments that may be open at the same time")
    attach_token: str = Field("", repr=False, description="Secret that attaching providers must know; empty: none may")
    attach_tokens_file: Path | None = Field(
        None, description="File of `trinity env tokens` with further tokens; read again when it changes"
    )
    idle_seconds: float = Field(3600.0, gt=0, description="An episode ends if its client sends nothing for so long")
    # Read by trinity.environments.allowed, in worker processes too.
    allowed_addresses: str = Field(
        "localhost,127.0.0.1,[::1]", description="Hosts, or host:port, whose URLs tasks of webshop and openenv may name"
    )
    sandbox_network: bool = Field(False, description="Tasks of sandbox may ask for the network of this machine")
    sandbox_memory_mib: int = Field(4096, ge=32, description="Most memory, and most disk, of one sandbox")
    sandbox_docker: bool = Field(False, description="Tasks of sandbox may name, build and run images with docker")
    sandbox_runtimes: Json[dict[str, dict[str, Any]]] = Field(
        {},
        validate_default=False,
        description="JSON: runtimes of Harbor's that tasks of sandbox may use, each with Harbor's options of it",
    )
    sandbox_harbor: Path | None = Field(None, description="Interpreter that has Harbor; else the service's own")
    sandbox_leases: Path | None = Field(
        None, description="Folder of the leases of sandboxes; else trinity-sandboxes-<user> in the one of $TMPDIR"
    )
    allowed_modules: str = Field(
        "", description="Modules that tasks of gymnasium (`module:Env`) and verifiers (`env_id`) may import"
    )
