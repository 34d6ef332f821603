"""`mode=bench` publishes to a sync service that it has just started."""

import grpc
import grpc.aio
import pytest

from trinity.api.sync.v1 import sync_pb2, sync_pb2_grpc
from trinity.modes import bench
from trinity.reading.errors import RunError
from trinity.weights.manifest import Manifest

pytestmark = pytest.mark.core


class StartingSync(sync_pb2_grpc.SyncServiceServicer):
    """Says twice that it is still starting."""

    calls = 0

    async def Publish(
        self, request: sync_pb2.PublishRequest, context: grpc.aio.ServicerContext
    ) -> sync_pb2.PublishResponse:
        self.calls += 1
        if self.calls <= 2:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the sync service is still starting")
        return sync_pb2.PublishResponse()


async def test_a_sync_service_that_is_still_starting_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_POLL_SECONDS", 0.01)
    server, sync = grpc.aio.server(), StartingSync()
    sync_pb2_grpc.add_SyncServiceServicer_to_server(sync, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    manifest = Manifest("run", 0, 0, (), (), (), 1.0, "model")
    try:
        await bench._publish(f"127.0.0.1:{port}", manifest)
        assert sync.calls == 3
        sync.calls = 0
        monkeypatch.setattr(bench, "_SYNC_SECONDS", 0.0)
        with pytest.raises(RunError, match=r"step 0 cannot be served: .* still starting"):
            await bench._publish(f"127.0.0.1:{port}", manifest)
    finally:
        await server.stop(grace=0)
