"""A log line inside a span has the span's trace_id; also when the line is written later, within the span's context."""

import io

import grpc
import grpc.aio
import pytest
import structlog
from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from trinity.runtime import logs, rpc, tracing
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

TRACE = 0x1234567890ABCDEF1234567890ABCDEF


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    root = structlog.stdlib.logging.getLogger()
    monkeypatch.setattr(root, "handlers", root.handlers)
    monkeypatch.setattr(root, "level", root.level)
    stream = io.StringIO()
    logs.configure("test", stream=stream)
    return stream


def test_lines_inside_and_within_a_span_name_its_trace(lines: io.StringIO) -> None:
    log = structlog.get_logger("test")
    log.info("before")
    with trace.use_span(NonRecordingSpan(SpanContext(TRACE, 1, is_remote=False, trace_flags=TraceFlags(1)))):
        log.info("inside")
        seen = get_current()
    with tracing.within(seen):
        log.info("afterwards")
    with tracing.within(Context()):
        log.info("outside")
    found = lines.getvalue().splitlines()
    assert [f"trace_id='{TRACE:032x}'" in line for line in found] == [False, True, True, False]


async def test_the_line_of_a_refused_call_names_the_trace_of_its_caller(
    lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The span of the call has ended when its error is logged."""

    async def refuse(request: bytes, context: object) -> bytes:
        raise InvalidInput("field", "is wrong")

    provider = TracerProvider()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    server = grpc.aio.server(interceptors=[rpc.Edge()])
    handler = grpc.unary_unary_rpc_method_handler(refuse, bytes, bytes)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", {"Method": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        context = (("traceparent", f"00-{TRACE:032x}-{1:016x}-01"),)
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/a.Service/Method")(b"", metadata=context)
    await server.stop(None)
    refused = next(line for line in lines.getvalue().splitlines() if "rpc.call.refused" in line)
    assert f"trace_id='{TRACE:032x}'" in refused
