"""nats-py's client; refusals of the server reach the calls that wait for them.

nats-py reports a refused permission only in a callback, while the call that caused it times out. It never reopens a
connection that the server ended, as servers do when credentials expire.
"""

import asyncio
import contextlib
import json
import re
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from urllib.parse import unquote

import nats.aio.client
import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.js.api import Header

from trinity.runtime.errors import InvalidInput, PermissionDenied, Unauthenticated
from trinity.runtime.logs import without_credentials

log = structlog.get_logger(__name__)

# What the server says of a user that it will not know later either.
_REFUSED = re.compile(r"authorization violation|authentication (expired|revoked)", re.IGNORECASE)
_FORBIDDEN = re.compile(r'permissions violation for (?P<verb>\w+)\D* "(?P<subject>[^"]+)"')
_FIRST_LINE = "NATS/1.0"
_NO_JETSTREAM_OF_ACCOUNT = 10039
_OF_THE_SERVER = (Header.STATUS.value, Header.DESCRIPTION.value)

Refuse = Callable[[str], None]


def parse_headers(raw: bytes | None) -> dict[str, str] | None:
    """Returns the headers of a message; of several with one name the last, which is the server's.

    A publisher chooses its message's headers, and NATS does not check them. nats-py would take `Status: 404` for an
    answer of the server, ignore what follows an empty line, and end the connection at a status that is no text. Only
    the first line tells a status here, because JetStream removes that of a publisher.
    """
    if not raw:
        return None
    first, *lines = raw.decode(errors="replace").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    found = {name: value.strip() for name, colon, value in pairs if colon and name not in _OF_THE_SERVER}
    status, _, description = first.removeprefix(_FIRST_LINE).strip().partition(" ")
    if status.isascii() and status.isdigit():
        found |= {Header.STATUS.value: status, Header.DESCRIPTION.value: description}
    return found or None


class Client(nats.aio.client.Client):
    """`user` is for messages. With `needs_tls` nothing is sent to a server that does not offer it."""

    def __init__(self, user: str, url: str, inbox: str, needs_tls: bool) -> None:
        super().__init__()
        self.user = user
        self._url = without_credentials(url)
        self._own_inbox = inbox.lower()
        self._needs_tls = needs_tls
        self._waiting: dict[str, list[Refuse]] = {}
        self._said: set[str] = set()
        self.was_connected = False

    @contextlib.contextmanager
    def told_of_refusal(self, subject: str, refuse: Refuse) -> Iterator[None]:
        """Call `refuse` with the reason if NATS forbids the subject while the body runs."""
        waiting = self._waiting.setdefault(subject.lower(), [])
        waiting.append(refuse)
        try:
            yield
        finally:
            waiting.remove(refuse)
            if not waiting:
                self._waiting.pop(subject.lower(), None)

    @contextlib.asynccontextmanager
    async def refusable(self, subject: str, seconds: float | None = None) -> AsyncIterator[None]:
        """PermissionDenied as soon as NATS forbids the subject while the body waits, TimeoutError after the time."""
        reasons: list[str] = []
        try:
            async with asyncio.timeout(seconds) as limit:

                def refuse(reason: str) -> None:
                    reasons.append(reason)
                    limit.reschedule(0.0)

                with self.told_of_refusal(subject, refuse):
                    yield
        except TimeoutError:
            if reasons:
                raise PermissionDenied(reasons[0]) from None
            raise

    async def request(self, subject: str, *args: Any, **kwargs: Any) -> Msg:
        async with self.refusable(subject):
            return await super().request(subject, *args, **kwargs)

    async def note_error(self, error: Exception) -> None:
        """Handles an error of a connection. Raises Unauthenticated while the first connection is made."""
        if _REFUSED.search(str(error)):
            reason = f"NATS at {self._url} refuses {self.user}: {without_credentials(str(error))}"
            if not self.was_connected:
                raise Unauthenticated(reason)
            self._say("nats.client.refused", reason)
        elif isinstance(error, ssl.SSLCertVerificationError) and not self.was_connected:
            raise Unauthenticated(
                f"NATS at {self._url} has a certificate that this process's authorities did not sign "
                f"({error.verify_message}): TRINITY_IDENTITY or TRINITY_NATS_CA must be of this run"
            )
        elif not isinstance(error, (ConnectionError, OSError, nats.errors.Error)):
            log.warning("nats.client.error", error=f"{type(error).__name__}: {without_credentials(str(error))}")

    def raise_without_jetstream(self, error: Exception) -> None:
        """Raises PermissionDenied or InvalidInput if an error of JetStream means that there is none."""
        if getattr(error, "err_code", None) == _NO_JETSTREAM_OF_ACCOUNT:
            raise PermissionDenied(f"NATS at {self._url} has no JetStream for the account of {self.user}; enable it")
        if not {"jetstream", "cluster"} & self._server_info.keys():  # another server of a cluster may have it
            raise InvalidInput("nats_url", f"{self._url} has no JetStream; start that nats-server with -js")

    def _connect_command(self) -> bytes:
        """Decodes user, password and token of a URL, which nats-py sends as the URL spells them."""
        verb, _, options = super()._connect_command().partition(b" ")
        said = json.loads(options)
        if self._current_server is not None and self._current_server.uri.username is not None:
            said |= {key: unquote(said[key]) for key in ("user", "pass", "auth_token") if key in said}
        return b"%s %s\r\n" % (verb, json.dumps(said).encode())

    async def _process_err(self, err_msg: str) -> None:
        found = _FORBIDDEN.search(err_msg)
        if found is None:
            error = nats.errors.Error(f"nats: {err_msg}")
            await self.note_error(error)
            await self._process_op_err(error)
            return
        subject = found["subject"]  # in small letters
        reason = f"NATS forbids {self.user} {_VERBS.get(found['verb'], 'to use')} {subject}"
        self._say("nats.permission.denied", reason)
        lost = list(self._waiting) if subject.startswith(self._own_inbox) else [subject]
        for refuse in [refuse for one in lost for refuse in self._waiting.get(one, ())]:
            refuse(reason)

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        return parse_headers(headers)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if self._needs_tls and not info.get("tls_required"):
            raise nats.errors.Error("nats: the server does not offer TLS, which nats_ca or tls:// asks for")
        await super()._process_info(info, initial_connection)

    def _say(self, event: str, reason: str) -> None:
        """Log a refusal once: it comes again with every retry."""
        if reason not in self._said:
            self._said.add(reason)
            log.error(event, reason=reason)


_VERBS = {"publish": "to publish on", "subscription": "to subscribe to"}
