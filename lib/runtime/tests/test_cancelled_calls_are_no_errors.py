"""gRPC prints a traceback of each handler that still ends as the loop does; the host waits for them."""

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from trinity.runtime import host

pytestmark = pytest.mark.core


def test_the_host_waits_for_streams_that_it_cancelled(capfd: pytest.CaptureFixture[str]) -> None:
    async def watch(request: bytes, context: object) -> AsyncIterator[bytes]:
        try:
            await asyncio.sleep(60)
            yield b""
        finally:
            await asyncio.sleep(0.2)  # it still ends as the server has stopped

    def running() -> list[str]:
        return [name for task in asyncio.all_tasks() if (name := task.get_name()).startswith("HandleExceptions[")]

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
        assert len(running()) == 1
        await host.cancelled_handlers_end()
        assert not running()
        with pytest.raises(grpc.aio.AioRpcError):  # else its error is logged by whichever test runs later
            await reading

    asyncio.run(serve())
    assert "Traceback" not in capfd.readouterr().err
