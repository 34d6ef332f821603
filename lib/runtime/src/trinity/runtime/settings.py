"""Settings of a service process: one declaration, from environment variables; unknown names are refused."""

import contextlib
import difflib
import ipaddress
import os
import re
import socket
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from trinity.runtime.errors import InvalidInput

# Hosts that no other machine reaches.
LOOPBACK = ("127.0.0.1", "::1", "localhost")

NO_RUN = "none"  # of log_run
_OF_TRINITY_RFT = ("TRINITY_BUFFER_PATH",)  # its variables, for YAMLs, that look like settings of a service
# Kubernetes gives every pod the addresses of its namespace's services: TRINITY_BUFFER_SERVICE_HOST and others.
_SERVICE_LINK = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")


class ServiceSettings(BaseSettings):
    """Settings of every service process. Prefix: TRINITY_<SERVICE>_."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True)
    role: ClassVar[str] = ""  # empty: the service's name

    listen: str = Field("127.0.0.1:0", description="Address of the gRPC server, host:port; port 0 takes a free one")
    advertise: str = Field(
        "",
        description="Address by which others reach the gRPC server, host:port; empty: that of listen, with the name "
        "of this host where listen is 0.0.0.0 or ::",
    )
    metrics_listen: str = Field("127.0.0.1:0", description="Address of /metrics, host:port; port 0 takes a free one")
    metrics_token_file: Path | None = Field(
        None, description="File with the token that /metrics asks for (Authorization: Bearer); empty: it asks for none"
    )
    log_file: Path | None = Field(None, description="JSON log lines go here as well as to standard error")
    log_mib: int = Field(400, ge=1, description="Most that log_file and its three older files may take, in MiB")
    log_level: str = Field(
        "INFO", pattern="^(?i)(DEBUG|INFO|WARNING|ERROR|CRITICAL)$", description="DEBUG, INFO, WARNING or ERROR"
    )
    drain_seconds: float = Field(5.0, gt=0, description="Time running calls get to end after SIGTERM, in seconds")
    exit_code_when_stopped: int = Field(
        0,
        ge=0,
        le=255,
        description="Exit code after a SIGTERM before the work was done; Kubernetes takes 0 for the end of a Job",
    )
    announce_file: Path | None = Field(
        None,
        description="Pid and addresses are written here once the server listens, and `finished` when the work is done",
    )
    stop_with_parent: bool = Field(False, description="End when the parent process ends")
    identity_folder: Path | None = Field(
        None, description="Folder with the run's tokens, as `trinity run` makes it; callers must have one of them"
    )
    tls_cert: Path | None = Field(
        None, description="PEM certificate of this process, for mTLS; `trinity certs` writes these three files"
    )
    tls_key: Path | None = Field(None, description="Private key of tls_cert; other users must not be able to read it")
    tls_ca: Path | None = Field(None, description="PEM certificates of the authorities whose certificates are trusted")
    tls_revoked: Path | None = Field(
        None,
        description="Serial numbers of certificates that are refused, as `trinity certs revoke` writes them; empty: "
        "the file `revoked` beside tls_ca, if there is one",
    )
    insecure: bool = Field(
        False,
        description="Trust the network: listen where other machines reach it without an identity (then every caller "
        "may call anything), and send tokens unencrypted beyond the loopback",
    )
    reflection: bool = Field(False, description="Serve gRPC reflection, for clients such as grpcurl")


class NatsSettings(ServiceSettings):
    """Settings of a service that uses NATS."""

    nats_url: str = Field("nats://127.0.0.1:4222", description="NATS with JetStream; servers of a cluster: by commas")
    nats_creds: Path | None = Field(
        None, description="File with this service's NATS credentials; empty: that of TRINITY_NATS_CREDS, if set"
    )
    log_run: str = Field(
        "", description="Id of the run whose stream on NATS gets this service's log lines; empty: its own; none: no run"
    )
    nats_ca: Path | None = Field(
        None,
        description="Certificates to check the NATS server's with, which then must use TLS; empty: TRINITY_NATS_CA",
    )

    @property
    def sends_lines(self) -> bool:
        """True if the log lines go to NATS."""
        return bool(self.nats_url) and self.log_run != NO_RUN


T = TypeVar("T", bound=ServiceSettings)


def load_settings(kind: type[T], **given: object) -> T:
    """Settings from the environment; `given` values that are not None win.

    Raises InvalidInput for a value out of range and for a misspelt variable under the prefix.
    """
    prefix = str(kind.model_config.get("env_prefix", "")).upper()
    known = {f"{prefix}{name}".upper() for name in kind.model_fields}
    for variable in os.environ:
        name = variable.upper()
        if name.startswith(prefix) and name not in {*known, *_OF_TRINITY_RFT} and not _is_service_link(name):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise InvalidInput(variable, f"is no setting of this service; {hint}")
    try:
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = f"{prefix}{'_'.join(map(str, first['loc']))}".upper()
        raise InvalidInput(name, f"is {first.get('input')!r}: {first['msg']}") from None


def _is_service_link(variable: str) -> bool:
    is_port = variable.endswith("_PORT") and "://" in os.environ.get(variable, "")
    return is_port or _SERVICE_LINK.fullmatch(variable) is not None


def split_address(address: str, field: str) -> tuple[str, int]:
    """host and port of "host:port"."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidInput(field, f"is {address!r}, must be host:port")
    return host.strip("[]"), int(port)


def reached_at(settings: ServiceSettings, port: int) -> str:
    """Address by which others reach a server that listens on a port. Raises InvalidInput for an invalid address."""
    host, _ = split_address(settings.listen, "listen")
    if not settings.advertise:
        return f"{socket.gethostname() if host in ('0.0.0.0', '::') else host}:{port}"
    if not split_address(settings.advertise, "advertise")[1]:
        raise InvalidInput("advertise", f"is {settings.advertise!r}, must have the port that others use")
    return settings.advertise


def is_loopback(host: str) -> bool:
    """Returns True if only this machine reaches the address; False for any name other than localhost."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
