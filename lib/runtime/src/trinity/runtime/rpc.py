"""gRPC as every service uses it: channel options, errors as statuses, trace context, durations."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError, Message

from trinity.runtime import tracing
from trinity.runtime.errors import InvalidInput, TrinityError, to_status
from trinity.runtime.metrics import RPC_SECONDS

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
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Above 1,000 calls that wait gRPC cancels some at random: a thousand explorers that report at once are no attack.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 50_000),
]
CLIENT_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


def metadata() -> list[tuple[str, str]]:
    """The current trace context as call metadata."""
    return list(tracing.inject().items())


def channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)


def blocking_channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, options=CLIENT_OPTIONS)


class _RefusalLog:
    """At most `_MOST_LINES` lines for refused calls of a method in `_WINDOW_SECONDS`; the rest is counted."""

    def __init__(self) -> None:
        self._windows: dict[str, tuple[float, int]] = {}

    def note(self, method: str, code: str, reason: str) -> None:
        now = time.monotonic()
        begin, count = self._windows.get(method, (now, 0))
        if now - begin > _WINDOW_SECONDS:
            if count > _MOST_LINES:
                log.warning("rpc.refused.more", method=method, calls=count - _MOST_LINES, seconds=round(now - begin))
            begin, count = now, 0
        self._windows[method] = begin, count + 1
        if count < _MOST_LINES:
            log.info("rpc.refused", method=method, code=code, reason=reason[:_LONGEST_REASON])


_refusals = _RefusalLog()


class Edge(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server.

    A message that is no protobuf, or a TrinityError, becomes a status with a message for the caller; anything else is
    INTERNAL and logged with its traceback. The caller's trace context becomes the current one.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None or not details.method.startswith("/trinity."):
            return handler
        method = details.method.removeprefix("/")
        parse = handler.request_deserializer
        streams_in, streams_out = handler.request_streaming, handler.response_streaming
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[(streams_in, streams_out)]
        inner = {
            (False, False): handler.unary_unary,
            (False, True): handler.unary_stream,
            (True, False): handler.stream_unary,
            (True, True): handler.stream_stream,
        }[(streams_in, streams_out)]

        def decode(request: Any) -> Any:
            return _decode_all(request, parse) if streams_in else _decode(request, parse)

        async def one(request: Any, context: grpc.aio.ServicerContext) -> Any:
            async with _edge(method, context):
                return await inner(decode(request), context)

        async def many(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with _edge(method, context):
                async for response in inner(decode(request), context):
                    yield response

        return make(many if streams_out else one, None, handler.response_serializer)


def _decode(data: bytes, parse: Callable[[bytes], Message]) -> Message:
    try:
        return parse(data)
    except DecodeError as error:
        raise InvalidInput("request", f"is not the protobuf message this method takes: {error}") from None


async def _decode_all(stream: AsyncIterator[bytes], parse: Callable[[bytes], Message]) -> AsyncIterator[Message]:
    async for data in stream:
        yield _decode(data, parse)


@contextlib.asynccontextmanager
async def _edge(method: str, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    begin, code = time.perf_counter(), grpc.StatusCode.OK
    parent = tracing.extract({key: str(value) for key, value in context.invocation_metadata() or ()})
    try:
        with tracing.span(method, parent=parent):
            yield
    except (asyncio.CancelledError, GeneratorExit):
        code = grpc.StatusCode.CANCELLED
        raise
    except Exception as error:
        code, message = to_status(error)
        if isinstance(error, TrinityError):
            _refusals.note(method, code.name, message)
        else:
            log.exception("rpc.failed", method=method)
        await context.abort(code, message[:_LONGEST_STATUS])
    finally:
        RPC_SECONDS.labels(method, code.name).observe(time.perf_counter() - begin)
