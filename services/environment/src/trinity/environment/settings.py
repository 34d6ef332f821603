"""Settings of the environment service. Prefix TRINITY_ENVIRONMENT_."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from trinity.runtime.settings import ServiceSettings


class EnvironmentSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="TRINITY_ENVIRONMENT_", extra="forbid", frozen=True)

    plugin_dirs: str = Field("", description="Folders with the users' reward functions, separated as PATH is")
    threads: int = Field(16, ge=1, description="Score calls that may run at the same time")
    max_episodes: int = Field(2048, ge=1, description="Episodes of all environments that may be open at the same time")
    attach_token: str = Field("", repr=False, description="Secret that attaching providers must know; empty: none may")
    idle_seconds: float = Field(3600.0, gt=0, description="An episode ends if its client sends nothing for so long")
