"""gRPC as every service uses it: channels, calls, identities, errors as statuses, trace context, durations.

A caller opens a channel and sends each request by `ask`, or by `ask_blocking` from a thread:

    async with rpc.channel(address) as channel:
        stub = sync_pb2_grpc.SyncServiceStub(channel)
        answer = await rpc.ask(stub.ListVersions, request, seconds=10)

A stream is read within `translate`, which raises the same errors:

    with rpc.translate(stub.Watch):
        async for answer in stub.Watch(request):
            ...

Both raise the TrinityError of the gRPC code (trinity.api.errors). A refusal has the service's own message, which names
field, value and fix. Any other failure names service, address, method and fix. NO_ANSWER are the errors after which the
same call may succeed later.
"""

import asyncio
import contextlib
import functools
import inspect
import operator
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Literal, TypeVar

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError, Message
from opentelemetry.context import get_current

from trinity.runtime import tracing
from trinity.runtime.errors import (
    InvalidInput,
    TimedOut,
    TrinityError,
    Unauthenticated,
    Unavailable,
    error_of,
    to_status,
)
from trinity.runtime.metrics import RPC_SECONDS
from trinity.runtime.trust import identity as trust
from trinity.runtime.trust.gate import Gate
from trinity.runtime.trust.identity import Identity, calling
from trinity.runtime.trust.tls import Material
from trinity.runtime.waits import waiting

log = structlog.get_logger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_WINDOW_SECONDS, _MOST_LINES = 10.0, 20
_LONGEST_REASON = 500  # characters
_LONGEST_STATUS = 4000  # characters: a status travels in headers, which have room for 8 KiB
_COMMON: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON,
    ("grpc.so_reuseport", 0),
    # A connection that says nothing holds a file descriptor; gRPC's own limit is two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # So does one that says only the preface, and answers pings. A channel of the run connects again for its next call.
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Above 1,000 calls that wait gRPC cancels some at random: a thousand explorers that report at once are no attack.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 50_000),
]
CLIENT_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON,
    # gRPC reads grpc_proxy, https_proxy and http_proxy, and would send a run's calls and tokens to a user's web proxy.
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


# How long a stream outlives the identity of its caller at most, in seconds.
ADMIT_AGAIN_SECONDS = 5.0
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")  # request, response
Shown = Identity | None | Literal["own"]
_Answer = TypeVar("_Answer")

NO_ANSWER = (Unavailable, TimedOut)
# Pauses before a call is sent again: the first, doubled each time up to the second; seconds.
RETRY_SECONDS = (0.1, 2.0)
# gRPC's own details for a message to a stream that has ended, mostly with its connection. No server sends them.
_WRITTEN_TOO_LATE = "Internal error from Core"


def channel(address: str, *, identity: Shown = "own") -> grpc.aio.Channel:
    """A channel whose calls carry an identity, this process's by default, and the current trace context.

    `identity` None: for addresses of others, which must not learn a token of the run. Raises InvalidInput where a token
    would cross a network unencrypted.
    """
    opened: Any = _Channel(grpc.aio, address, identity)
    return opened


def blocking_channel(address: str, *, identity: Shown = "own") -> grpc.Channel:
    """The same for threads."""
    opened: Any = _Channel(grpc, address, identity)
    return opened


class _Channel:
    """A channel of the module grpc or grpc.aio. A call after a rotation of certificates uses a new connection.

    gRPC fixes a channel's certificate when it is made. So this one makes another when the identity's files change, and
    only lets the replaced one go: calls in progress on it run to their ends. It wraps methods, as interceptors of
    grpc.aio put a queue and a task into every stream.
    """

    def __init__(self, module: Any, address: str, identity: Shown) -> None:
        self._module, self.address = module, address
        self.identity = trust.own() if identity == "own" else identity
        if self.identity is not None:
            self.identity.check_address(address)
        self._lock = threading.Lock()
        self._channel: Any = None
        self._material: Material | None = None
        self.newest()

    def newest(self) -> Any:
        """Returns gRPC's channel with the newest certificate."""
        tls = self.identity.tls if self.identity is not None else None
        with self._lock:
            material = tls.current() if tls is not None else None
            if self._channel is None or material is not self._material:
                self._material, self._channel = material, self._connect(material)
            return self._channel

    def _connect(self, material: Material | None) -> Any:
        if material is None:
            return self._module.insecure_channel(self.address, options=CLIENT_OPTIONS)
        credentials = grpc.ssl_channel_credentials(material.roots, material.key, material.chain)
        return self._module.secure_channel(self.address, credentials, options=CLIENT_OPTIONS)

    def __getattr__(self, name: str) -> Any:
        return functools.partial(_Method, self, name) if name in _KINDS else getattr(self.newest(), name)

    def __enter__(self) -> "_Channel":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    async def __aenter__(self) -> "_Channel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()


class _Method:
    """A method of a stub, which adds identity and trace context to each call, and knows where it is sent."""

    def __init__(self, channel: _Channel, kind: str, path: str, *of: Any, **options: Any) -> None:
        self._channel, self.address = channel, channel.address
        self.path = path  # /trinity.api.sync.v1.SyncService/Publish
        self._make = operator.methodcaller(kind, path, *of, **options)
        self._made: tuple[Any, Any] = (None, None)  # gRPC's channel, and this method of it

    def __call__(self, *arguments: Any, **given: Any) -> Any:
        channel, (made_on, send) = self._channel.newest(), self._made
        if made_on is not channel:
            send = self._make(channel)
            self._made = channel, send
        identity = self._channel.identity
        shown = identity.metadata() if identity is not None else []
        return send(*arguments, metadata=[*shown, *tracing.inject().items()], **given)


async def ask(
    method: Callable[..., Awaitable[_Answer]],
    request: Any,
    *,
    seconds: float,
    waits: bool = False,
    again: Callable[[], bool] | None = None,
) -> _Answer:
    """Sends a request to a stub's method and returns the answer, or raises a TrinityError (see above).

    `seconds`: deadline of one attempt. `waits`: an attempt waits within its deadline for a service that is not there
    yet. `again` is called after each of NO_ANSWER: while it returns True the call is repeated after a pause that grows
    from 0.1 to 2 seconds; without it the first error is raised.
    """
    pause, longest = RETRY_SECONDS
    with _Silence(method, begun=waits) as silence:
        while True:
            try:
                with translate(method):
                    return await method(request, timeout=seconds, wait_for_ready=waits)
            except NO_ANSWER as error:
                if again is None or not again():
                    raise
                silence.of(error)
            await asyncio.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, longest)


def ask_blocking(
    method: Callable[..., _Answer],
    request: Any,
    *,
    seconds: float,
    waits: bool = False,
    again: Callable[[], bool] | None = None,
) -> _Answer:
    """`ask` for threads, with a stub of a blocking channel."""
    pause, longest = RETRY_SECONDS
    with _Silence(method, begun=waits) as silence:
        while True:
            try:
                with translate(method):
                    return method(request, timeout=seconds, wait_for_ready=waits)
            except NO_ANSWER as error:
                if again is None or not again():
                    raise
                silence.of(error)
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, longest)


class _Silence(contextlib.ExitStack):
    """Says on the screen whom a call waits for: from its first failure, or from the start of a call that `waits`."""

    def __init__(self, method: Any, *, begun: bool) -> None:
        super().__init__()
        self._method, self._reason, self._is_said = method, "it has not answered yet", False
        if begun:
            self._begin()

    def of(self, error: Exception) -> None:
        log.info("rpc.call.repeated", reason=str(error))
        self._reason = str(error)
        self._begin()

    def _begin(self) -> None:
        if not self._is_said:
            self._is_said = True
            service, address, _ = _destination(self._method)
            self.enter_context(waiting(f"{service}{address}", lambda: self._reason))


@contextlib.contextmanager
def translate(method: Callable[..., Any]) -> Iterator[None]:
    """Raises gRPC's errors in the block, which come from calls of a stub's method, as TrinityErrors."""
    try:
        yield
    except grpc.RpcError as error:
        raise failure(error, method) from None
    except grpc.aio.UsageError as error:
        service, address, name = _destination(method)
        raise Unavailable(f"the connection to {service}{address} was closed before {name}: {error}") from None


def failure(error: Any, method: Callable[..., Any]) -> TrinityError:
    """The TrinityError of a grpc.RpcError that a call of a stub's method raised or returned."""
    code, details = error.code(), str(error.details())
    if code is grpc.StatusCode.CANCELLED or details == _WRITTEN_TOO_LATE:  # the server ended, or the connection
        code = grpc.StatusCode.UNAVAILABLE
    service, address, name = _destination(method)
    if code is grpc.StatusCode.UNAVAILABLE:
        details = f"{service}{address} does not answer {name} ({details}); check that it runs and can be reached"
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
        details = f"{service}{address} did not answer {name} in time ({details}); check that it runs and can be reached"
    elif code is grpc.StatusCode.UNIMPLEMENTED:
        details = f"{service}{address} has no {name} ({details}); install the same version of Trinity on both sides"
    elif code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        details = f"{service}{address} failed in {name} ({details}); its log says why"
    return error_of(code, details)


def _destination(method: Any) -> tuple[str, str, str]:
    """Service, address and name of a stub's method: ("the sync service", " at 10.0.0.1:4000", "Publish")."""
    package, _, name = getattr(method, "path", "").rpartition("/")
    service = package.split(".")[2] if package.startswith("/trinity.api.") else ""
    address = getattr(method, "address", "")
    return f"the {service} service" if service else "the service", f" at {address}" if address else "", name or "a call"


class _RefusalLog:
    """At most `_MOST_LINES` lines for refused calls of a method in `_WINDOW_SECONDS`; the rest is counted."""

    def __init__(self) -> None:
        self._windows: dict[str, tuple[float, int]] = {}

    def note(self, method: str, code: str, reason: str) -> None:
        now = time.monotonic()
        begin, count = self._windows.get(method, (now, 0))
        if now - begin > _WINDOW_SECONDS:
            if count > _MOST_LINES:
                log.warning(
                    "rpc.call.refused_more", method=method, calls=count - _MOST_LINES, seconds=round(now - begin)
                )
            begin, count = now, 0
        self._windows[method] = begin, count + 1
        if count < _MOST_LINES:
            log.info("rpc.call.refused", method=method, code=code, reason=reason[:_LONGEST_REASON])


_refusals = _RefusalLog()


class Edge(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server.

    With a gate, the caller must have an identity whose role may call the method. A message that is no protobuf, or a
    TrinityError, becomes a status with a message for the caller; anything else is INTERNAL and logged with its
    traceback. The caller's trace context becomes the current one.
    """

    def __init__(self, gate: Gate | None = None) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None:
            return None
        method = details.method.removeprefix("/")
        parse = handler.request_deserializer
        streams_in, streams_out = handler.request_streaming, handler.response_streaming
        kind = _KINDS[2 * streams_in + streams_out]
        inner, make = getattr(handler, kind), getattr(grpc, f"{kind}_rpc_method_handler")

        def decode(request: Any) -> Any:
            return _decode_all(request, parse) if streams_in else _decode(request, parse)

        async def one(request: Any, context: grpc.aio.ServicerContext) -> Any:
            async with _edge(method, context, self._gate, lasts=streams_in):
                return await inner(decode(request), context)

        async def many(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with _edge(method, context, self._gate, lasts=True):
                responses = inner(decode(request), context)
                if inspect.isawaitable(responses):  # it writes by itself, as gRPC's health does
                    await responses
                    return
                async for response in responses:
                    yield response

        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with _edge(method, context, self._gate, lasts=False):
                raise Unauthenticated(f"{method}: the caller's identity has just changed; call again")
            yield

        # As a stream that reads nothing: the message of a call that is refused takes no memory.
        if self._gate is not None and self._gate.is_refused(details.method, details.invocation_metadata or ()):
            return grpc.stream_stream_rpc_method_handler(refuse)
        return make(many if streams_out else one, None, handler.response_serializer)


def _decode(data: bytes, parse: Callable[[bytes], Message]) -> Message:
    try:
        return parse(data)
    except DecodeError as error:
        raise InvalidInput("request", f"is not the protobuf message this method takes: {error}") from None


async def _decode_all(stream: AsyncIterator[bytes], parse: Callable[[bytes], Message]) -> AsyncIterator[Message]:
    async for data in stream:
        yield _decode(data, parse)


class _Watch:
    """Ends a stream whose caller may not call any more: the token was replaced, or the certificate expired.

    It cancels the task that entered the block, which then raises the gate's error.
    """

    def __init__(self, gate: Gate, method: str, context: grpc.aio.ServicerContext) -> None:
        self._gate, self._method, self._context = gate, method, context
        self._task = asyncio.current_task()
        self._refused: TrinityError | None = None

    def _look(self) -> None:
        try:
            self._gate.admit(self._method, self._context)
        except TrinityError as error:
            self._refused = error
            if self._task is not None:
                self._task.cancel()
        else:
            self._again()

    def _again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(ADMIT_AGAIN_SECONDS, self._look)

    def __enter__(self) -> None:
        self._again()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if self._refused is not None and kind is asyncio.CancelledError and self._task is not None:
            self._task.uncancel()
            raise self._refused from None


@contextlib.asynccontextmanager
async def _edge(
    method: str, context: grpc.aio.ServicerContext, gate: Gate | None, *, lasts: bool
) -> AsyncIterator[None]:
    """`lasts`: the call is a stream, whose caller's identity is checked repeatedly."""
    begin, code = time.perf_counter(), grpc.StatusCode.OK
    seen = parent = tracing.extract({key: str(value) for key, value in context.invocation_metadata() or ()})
    try:
        with tracing.span(method, parent=parent):
            seen = get_current()
            if gate is not None:
                calling.set(gate.admit(f"/{method}", context))
            with _Watch(gate, f"/{method}", context) if gate is not None and lasts else contextlib.nullcontext():
                yield
            log.debug("rpc.call.answered", method=method)
    except (asyncio.CancelledError, GeneratorExit):
        code = grpc.StatusCode.CANCELLED
        raise
    except grpc.aio.AbortError:  # the handler has answered, as gRPC's health does for a service it does not know
        code = next((one for one in grpc.StatusCode if context.code() in (one, one.value[0])), code)
        raise
    except NotImplementedError:  # gRPC's asynchronous health has no List
        code = grpc.StatusCode.UNIMPLEMENTED
        await context.abort(code, f"{method} is not implemented")
    except Exception as error:
        code, message = to_status(error)
        with tracing.within(seen):
            if isinstance(error, TrinityError):
                _refusals.note(method, code.name, message)
            else:
                log.exception("rpc.call.failed", method=method)
        await context.abort(code, message[:_LONGEST_STATUS])
    finally:
        RPC_SECONDS.labels(method, code.name).observe(time.perf_counter() - begin)
