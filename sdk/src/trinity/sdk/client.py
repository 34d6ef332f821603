"""A provider behind NAT. It calls the environment service of a run and plays through that one stream."""

import asyncio
import contextlib
import ipaddress
import logging
import os
import random
import socket
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import NamedTuple

import grpc
import grpc.aio

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.sdk import contract, wire
from trinity.sdk.arena import Arena
from trinity.sdk.dispatcher import Dispatcher
from trinity.sdk.environment import EnvironmentClass
from trinity.sdk.errors import InvalidInput, TrinityError
from trinity.sdk.scoring import Scorer
from trinity.sdk.serve import until_signal

log = logging.getLogger(__name__)

_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # a web proxy of the shell reaches no service of a run
    ("grpc.max_receive_message_length", contract.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", contract.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
# Statuses that a retry does not change.
_FINAL = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
}
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.2, 10.0
_ANSWER_SECONDS = 20.0


class AttachRefused(TrinityError):
    """The environment service refused this provider; the message has the reason."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Tls(NamedTuple):
    """Files of a certificate for the role `provider`: tls.crt, tls.key and ca.crt of `trinity certs issue provider`.

    They are read again for every connection.
    """

    cert: str | Path
    key: str | Path
    ca: str | Path


class Provider:
    """Environments and scorers that attach, and attach again after every lost connection."""

    def __init__(
        self,
        *environments: EnvironmentClass,
        address: str,
        token: str = "",
        name: str = "",
        scorers: Mapping[str, Scorer] | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Raises InvalidInput if the token would cross a network unencrypted, unless TRINITY_INSECURE is 1."""
        if token and tls is None and not _stays_here(address) and os.environ.get("TRINITY_INSECURE") != "1":
            problem = f"is {address!r}, where the token would be sent unencrypted"
            raise InvalidInput("address", f"{problem}; give tls, or set TRINITY_INSECURE=1 to trust the network")
        self.address = address
        self._tls = tls
        self.arena = Arena(environments, scorers)
        # Set while the service accepts the offer.
        self.attached = asyncio.Event()
        instance = uuid.uuid4().hex
        self._offer = contract.Offer(
            protocol_version=contract.PROTOCOL_VERSION,
            token=token,
            provider=name or f"{socket.gethostname()}-{os.getpid()}-{instance[:6]}",
            instance=instance,
            environments=[source.description for source in self.arena.sources.values()],
            scorers=sorted(self.arena.scorers),
        )

    async def run(self) -> None:
        """Attaches, again whenever the connection is lost, until cancelled. Raises AttachRefused."""
        pause = _FIRST_PAUSE_SECONDS
        try:
            while True:
                try:
                    await self._attach_once()
                    reason = "the service ended the stream"
                except grpc.aio.AioRpcError as error:
                    if error.code() in _FINAL:
                        raise AttachRefused(f"{self.address}: {error.code().name}: {error.details()}") from None
                    reason = f"{error.code().name}: {error.details()}"
                except TimeoutError:
                    reason = f"no answer to the offer in {_ANSWER_SECONDS:g} s"
                if self.attached.is_set():
                    pause = _FIRST_PAUSE_SECONDS
                self.attached.clear()
                log.warning("not attached to %s, again in %.1f s: %s", self.address, pause, reason)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)
        finally:
            await self.arena.drain(0)

    def _channel(self) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(self.address, options=_OPTIONS)
        cert, key, ca = (Path(path).read_bytes() for path in self._tls)
        return grpc.aio.secure_channel(self.address, grpc.ssl_channel_credentials(ca, key, cert), options=_OPTIONS)

    async def _attach_once(self) -> None:
        async with self._channel() as channel:
            call = environment_pb2_grpc.EnvironmentServiceStub(channel).Attach()
            async with asyncio.timeout(_ANSWER_SECONDS):
                with contextlib.suppress(asyncio.InvalidStateError):  # refused at once: `read` raises the reason
                    await call.write(pb.AttachRequest(offer=wire.offer_to_proto(self._offer)))
                first = await call.read()
            if first is grpc.aio.EOF:
                await _raise_status(call)
                return
            self.attached.set()
            log.info("attached to %s as %s", self.address, self._offer.provider)
            dispatcher = Dispatcher(self.arena)
            sending = asyncio.create_task(self._send(call, dispatcher))
            try:
                while (response := await call.read()) is not grpc.aio.EOF:
                    for message in response.calls:
                        dispatcher.dispatch(wire.call_from_proto(message))
                await _raise_status(call)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                await dispatcher.close()
                call.cancel()

    async def _send(self, call: grpc.aio.StreamStreamCall, dispatcher: Dispatcher) -> None:
        try:
            while True:
                for batch in await dispatcher.outbox.batches():
                    await call.write(pb.AttachRequest(replies=batch))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # `read` raises the reason


def _stays_here(address: str) -> bool:
    """Returns True for addresses on this machine, which no network separates from this process."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost" or address.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _raise_status(call: grpc.aio.StreamStreamCall) -> None:
    code = await call.code()
    if code is not grpc.StatusCode.OK:
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), await call.details())


@contextlib.asynccontextmanager
async def attaching(
    *environments: EnvironmentClass,
    address: str,
    token: str = "",
    name: str = "",
    scorers: Mapping[str, Scorer] | None = None,
    tls: Tls | None = None,
) -> AsyncIterator[Provider]:
    """Stays attached inside the `async with`, which begins once the service accepts. Raises the errors of `attach`."""
    provider = Provider(*environments, address=address, token=token, name=name, scorers=scorers, tls=tls)
    running = asyncio.create_task(provider.run())
    attached = asyncio.create_task(provider.attached.wait())
    try:
        await asyncio.wait([running, attached], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        yield provider
    finally:
        for task in (running, attached):
            task.cancel()
        await asyncio.gather(running, attached, return_exceptions=True)


async def attach_async(
    *environments: EnvironmentClass,
    address: str,
    token: str = "",
    name: str = "",
    scorers: Mapping[str, Scorer] | None = None,
    tls: Tls | None = None,
) -> None:
    """Stays attached until cancelled. Raises the errors of `attach`."""
    await Provider(*environments, address=address, token=token, name=name, scorers=scorers, tls=tls).run()


def attach(
    *environments: EnvironmentClass,
    address: str,
    token: str = "",
    name: str = "",
    scorers: Mapping[str, Scorer] | None = None,
    tls: Tls | None = None,
) -> None:
    """Stays attached until SIGTERM or Ctrl-C; reconnects after a lost connection.

    `token`: from `trinity env tokens create`, or the service's TRINITY_ENVIRONMENT_ATTACH_TOKEN. `name`: shown in the
    service's log; by default host and process id. `tls`: needed if the service has a certificate. Raises AttachRefused,
    and InvalidInput if the token would cross a network unencrypted, unless TRINITY_INSECURE is 1.
    """
    attached = attach_async(*environments, address=address, token=token, name=name, scorers=scorers, tls=tls)
    asyncio.run(until_signal(attached))
