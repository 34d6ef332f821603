"""Opening a connection: who this process is to NATS, and whether NATS is whom it should be."""

import asyncio
import contextlib
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nats.errors
import nats.js.errors
import structlog

from trinity.runtime import waits
from trinity.runtime.broker.client import Client
from trinity.runtime.broker.connection import Broker
from trinity.runtime.errors import InvalidInput, PermissionDenied, Unauthenticated, Unavailable
from trinity.runtime.logs import without_credentials
from trinity.runtime.trust.nats_users import User, read_user

log = structlog.get_logger(__name__)


@dataclass
class _Identity:
    creds: Path | None = None
    ca: Path | None = None


_identity = _Identity()


def configure(creds: Path | None, ca: Path | None) -> None:
    """Sets this process's identity for all later connections to NATS: see `connect`."""
    _identity.creds, _identity.ca = creds, ca


def credentials() -> Path | None:
    """The file of this process's NATS credentials, if it has one."""
    return _identity.creds or _file_of("TRINITY_NATS_CREDS")


async def _answers(broker: Broker, client: Client) -> None:
    """Until JetStream answers: a cluster that has just started has no leader yet."""
    while True:
        try:
            await broker.js.account_info()
            return
        except (TimeoutError, nats.errors.TimeoutError, nats.js.errors.ServiceUnavailableError) as error:
            client.raise_without_jetstream(error)
            await asyncio.sleep(0.1)


async def connect(
    url: str,
    name: str,
    *,
    creds: Path | None = None,
    ca: Path | None = None,
    wait_seconds: float = 30.0,
    request_seconds: float = 2.0,
    **options: Any,
) -> Broker:
    """Connect to NATS with JetStream. Afterwards the client reconnects by itself for as long as it lives.

    `url`: of a server, or of several of a cluster, separated by commas; the client learns the others from the first
    that answers.
    `creds`: file of the user's credentials, read at every connection. `ca`: certificates to check the server's with;
    then nothing is sent without TLS. Not given, they are what `configure` said, or else what TRINITY_NATS_CREDS and
    TRINITY_NATS_CA name.

    Raises Unauthenticated if NATS refuses the user or has a certificate of another authority than `ca`,
    PermissionDenied if the user may not use JetStream, InvalidInput for files that cannot be read, for a url that is
    none of NATS and for a server without JetStream, Unavailable if there is no answer within `wait_seconds`.
    """
    for server in url.split(","):
        _check_server(server)
    creds = creds or credentials()
    ca = ca or _identity.ca or _file_of("TRINITY_NATS_CA")
    user = read_user(creds) if creds is not None else User(urlsplit(url).username or "a client without credentials")
    needs_tls = ca is not None or url.startswith("tls://")
    client, shown = Client(_described(user, creds), url, user.inbox, needs_tls), without_credentials(url)

    away = contextlib.ExitStack()  # closed once NATS is there again, or not needed any more

    async def on_disconnect() -> None:
        log.info("nats.client.disconnected", url=shown)
        away.close()
        away.enter_context(waits.waiting(f"NATS at {shown}", "the connection is lost"))

    def why() -> str:
        return without_credentials(str(client.last_error or "no answer"))

    async def on_reconnect() -> None:
        log.info("nats.client.reconnected", url=shown)
        away.close()

    async def on_close() -> None:
        away.close()

    try:
        with waits.waiting(f"NATS at {shown}", why, limit_seconds=wait_seconds):
            await asyncio.wait_for(
                client.connect(
                    url.split(","),
                    name=name,
                    error_cb=client.note_error,
                    disconnected_cb=on_disconnect,
                    reconnected_cb=on_reconnect,
                    closed_cb=on_close,
                    connect_timeout=2,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.2,  # type: ignore[arg-type]  # a float works, the annotation says int
                    ping_interval=5,
                    max_outstanding_pings=2,
                    pending_size=64 * 1024 * 1024,
                    user_credentials=creds,
                    inbox_prefix=user.inbox.encode(),
                    tls=_tls_context(ca) if needs_tls else None,
                    **options,
                ),
                wait_seconds,
            )
            client.was_connected = True
            broker = Broker(client, request_seconds)
            await asyncio.wait_for(_answers(broker, client), wait_seconds)
    except (InvalidInput, PermissionDenied, Unauthenticated):
        await _abandon(client)
        raise
    except (TimeoutError, OSError, nats.errors.Error, nats.js.errors.Error) as error:
        await _abandon(client)
        last = client.last_error if isinstance(error, TimeoutError) else None
        detail = without_credentials(f"{type(error).__name__} {last or error}".strip())
        raise Unavailable(
            f"NATS with JetStream at {shown} did not answer within {wait_seconds:g} s ({detail})"
        ) from None
    return broker


def _check_server(url: str) -> None:
    """InvalidInput unless nats-py could dial it; a server without a scheme is `host` or `host:port`."""
    with contextlib.suppress(ValueError):  # a port that is no number; half of an IPv6 address
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        if parts.scheme in ("nats", "tls") and parts.hostname and parts.port != 0:
            return
    form = "nats://host:port or tls://host:port, with , / @ : % of a password as %2C %2F %40 %3A %25"
    raise InvalidInput("nats_url", f"is {without_credentials(url)!r}, must be {form}")


async def _abandon(client: Client) -> None:
    with contextlib.suppress(Exception):
        await asyncio.wait_for(client.close(), 1)


def _file_of(variable: str) -> Path | None:
    given = os.environ.get(variable)
    return Path(given) if given else None


def _described(user: User, creds: Path | None) -> str:
    if creds is None:
        return user.name
    return f"{user.name} ({creds}{', expired' if user.has_expired else ''})"


class _FollowedCa(ssl.SSLContext):
    """Trusts what its file holds when a connection is made, so that a client reconnects after the CA was replaced.
    What was trusted before stays trusted until the process ends."""

    ca: Path

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        with contextlib.suppress(OSError):  # being replaced
            self.load_verify_locations(cafile=self.ca)
        return super().wrap_bio(*args, **options)


def _tls_context(ca: Path | None) -> ssl.SSLContext:
    if ca is None:
        return ssl.create_default_context()
    context = _FollowedCa(ssl.PROTOCOL_TLS_CLIENT)
    context.ca = ca
    try:
        context.load_verify_locations(cafile=ca)
    except OSError as error:
        raise InvalidInput("nats_ca", f"{ca} holds no certificates: {error}") from None
    return context
