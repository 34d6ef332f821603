"""Settings of a service process: one declaration, from environment variables; unknown names are refused."""

import difflib
import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from trinity.runtime.errors import InvalidInput


class ServiceSettings(BaseSettings):
    """What every service process needs to know. Prefix: TRINITY_<SERVICE>_."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True)

    listen: str = Field("127.0.0.1:0", description="Address of the gRPC server, host:port; port 0 takes a free one")
    metrics_listen: str = Field("127.0.0.1:0", description="Address of /metrics, host:port; port 0 takes a free one")
    log_file: Path | None = Field(None, description="JSON log lines go here as well as to standard error")
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
    drain_seconds: float = Field(5.0, gt=0, description="Time running calls get to end after SIGTERM, in seconds")
    announce_file: Path | None = Field(
        None,
        description="Pid and addresses are written here once the server listens, and `finished` when the work is done",
    )
    stop_with_parent: bool = Field(False, description="End when the parent process ends")


T = TypeVar("T", bound=ServiceSettings)


def load_settings(kind: type[T], **given: object) -> T:
    """Settings from the environment; `given` values that are not None win.

    Raises InvalidInput for a value out of range and for a misspelt variable under the prefix.
    """
    prefix = str(kind.model_config.get("env_prefix", "")).upper()
    known = {f"{prefix}{name}".upper() for name in kind.model_fields}
    for variable in os.environ:
        if variable.upper().startswith(prefix) and variable.upper() not in known:
            near = difflib.get_close_matches(variable.upper(), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise InvalidInput(variable, f"is no setting of this service; {hint}")
    try:
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = f"{prefix}{'_'.join(map(str, first['loc']))}".upper()
        raise InvalidInput(name, f"is {first.get('input')!r}: {first['msg']}") from None


def split_address(address: str, field: str) -> tuple[str, int]:
    """host and port of "host:port"."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidInput(field, f"is {address!r}, must be host:port")
    return host.strip("[]"), int(port)
