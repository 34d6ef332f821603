"""Settings of the environment service. Prefix TRINITY_ENVIRONMENT_."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from trinity.runtime.settings import ServiceSettings


class EnvironmentSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="TRINITY_ENVIRONMENT_", extra="forbid", frozen=True)

    threads: int = Field(16, ge=1, description="Environment steps that may run at the same time")
