"""Channels over mTLS that outlive their certificate: a call after a rotation goes over a new connection.

gRPC fixes a channel's certificate when it is made. So these make a new channel when the identity's files have changed;
the replaced one is only let go, and calls in progress on it run to their ends.
"""

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from trinity.runtime.trust.tls import TlsIdentity

C = TypeVar("C", grpc.Channel, grpc.aio.Channel)


class _Newest(Generic[C]):
    """The methods of a channel, each called on the channel with the newest certificate."""

    def __init__(self, identity: TlsIdentity, make: Callable[[grpc.ChannelCredentials], C]) -> None:
        self._identity, self._make = identity, make
        self._lock = threading.Lock()
        self._material = identity.current()
        self._channel = self._new()

    def _new(self) -> C:
        files = self._material
        return self._make(grpc.ssl_channel_credentials(files.roots, files.key, files.chain))

    def newest(self) -> C:
        with self._lock:
            if (material := self._identity.current()) is not self._material:
                self._material = material
                self._channel = self._new()
            return self._channel

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return _Method(self, "unary_unary", *args, **options)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return _Method(self, "unary_stream", *args, **options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return _Method(self, "stream_unary", *args, **options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return _Method(self, "stream_stream", *args, **options)


class _Method:
    """One RPC of the newest channel, whichever that is at the time of a call."""

    def __init__(self, owner: _Newest[Any], kind: str, *args: Any, **options: Any) -> None:
        self._owner, self._kind, self._args, self._options = owner, kind, args, options
        self._made: tuple[Any, Any] = (None, None)  # a channel, and this RPC on it

    def _newest(self) -> Any:
        channel, (made_on, method) = self._owner.newest(), self._made
        if made_on is not channel:
            method = getattr(channel, self._kind)(*self._args, **self._options)
            self._made = channel, method
        return method

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._newest()(*args, **options)

    def future(self, *args: Any, **options: Any) -> Any:
        return self._newest().future(*args, **options)

    def with_call(self, *args: Any, **options: Any) -> Any:
        return self._newest().with_call(*args, **options)


class TlsChannel(_Newest[grpc.aio.Channel], grpc.aio.Channel):
    """A channel of grpc.aio; `make` makes one with given credentials."""

    async def __aenter__(self) -> "TlsChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.newest().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.newest().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.newest().channel_ready()


class BlockingTlsChannel(_Newest[grpc.Channel], grpc.Channel):
    """The same for blocking calls."""

    def __enter__(self) -> "BlockingTlsChannel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def subscribe(self, callback: Callable[[grpc.ChannelConnectivity], Any], try_to_connect: bool = False) -> None:
        self.newest().subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], Any]) -> None:
        self.newest().unsubscribe(callback)
