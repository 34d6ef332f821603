"""gRPC logs an error with a traceback for a handler that the end of its process cancelled; real errors stay."""

import asyncio
import io
import logging
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from trinity.runtime import host, logs

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("error", "is_logged"), [(asyncio.CancelledError(), False), (ZeroDivisionError("x"), True), (None, True)]
)
def test_only_errors_are_logged(error: BaseException | None, is_logged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    root, stream = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", root.handlers)
    monkeypatch.setattr(root, "level", root.level)
    logs.configure("test", stream=stream)
    grpc_log = logging.getLogger("grpc._cython.cygrpc")
    grpc_log.error("Exception not handled by _handle_exceptions in servicer method [/a/Watch]", exc_info=error)
    assert bool(stream.getvalue()) is is_logged
    assert ("Traceback" in stream.getvalue() or "ZeroDivisionError" in stream.getvalue()) is (is_logged and bool(error))


@pytest.mark.parametrize("waits", [True, False], ids=["as the host", "without its wait"])
def test_a_stream_at_the_end_of_the_loop_prints_nothing(waits: bool, capfd: pytest.CaptureFixture[str]) -> None:
    async def watch(request: bytes, context: object) -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    async def serve() -> None:
        server = grpc.aio.server()
        handlers = {"Watch": grpc.unary_stream_rpc_method_handler(watch)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        call = grpc.aio.insecure_channel(f"127.0.0.1:{port}").unary_stream("/a.B/Watch")(b"")
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0.3)
        assert not reading.done()
        await server.stop(0.1)
        if waits:
            await host.cancelled_handlers_end()

    asyncio.run(serve())
    assert ("Traceback" in capfd.readouterr().err) is not waits
