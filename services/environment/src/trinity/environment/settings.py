"""Settings of the environment service. Prefix TRINITY_ENVIRONMENT_."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from trinity.runtime.settings import ServiceSettings


class EnvironmentSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="TRINITY_ENVIRONMENT_", extra="forbid", frozen=True)

    plugin_dirs: str = Field("", description="Folders with the users' reward functions, separated as PATH is")
    threads: int = Field(16, ge=1, description="Environment steps that may run at the same time")
