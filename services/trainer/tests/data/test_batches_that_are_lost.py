"""A batch that the buffer has lost ends the trainer permanently; one that a NATS replica has late does not."""

from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.buffer.v1 import buffer_pb2_grpc
from trinity.runtime.errors import TrinityError
from trinity.trainer.data import client as batches
from trinity.trainer.data.client import BatchLost, BufferClient

pytestmark = pytest.mark.core


class Losing(buffer_pb2_grpc.BufferServiceServicer):
    """Loses the batch of step 1 for the first `times` that it is asked for. Refuses it for negative ones."""

    def __init__(self, times: int) -> None:
        self.times = times

    def Rewind(self, request: pb.RewindRequest, context: grpc.ServicerContext) -> pb.RewindResponse:
        context.abort(grpc.StatusCode.DATA_LOSS, "experience of step 1 was released")
        raise AssertionError("abort raises")

    def StreamBatches(self, request: pb.StreamBatchesRequest, context: grpc.ServicerContext) -> Iterator[pb.BatchPart]:
        if self.times < 0:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "path: has 30 rows")
        self.times -= 1
        if self.times >= 0:
            context.abort(grpc.StatusCode.DATA_LOSS, "the group is gone")
        self.times = 0
        yield pb.BatchPart(entry=pb.LedgerEntry(step=1))
        yield pb.BatchPart(end=pb.BatchEnd())


@pytest.fixture
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[BufferClient]:
    monkeypatch.setattr(batches, "_RETRY_SECONDS", 0.01)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    buffer_pb2_grpc.add_BufferServiceServicer_to_server(Losing(request.param), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    made = BufferClient(f"127.0.0.1:{port}", "a run")
    yield made
    made.close()
    server.stop(None)


@pytest.mark.parametrize("client", [1000], indirect=True)
def test_a_batch_that_stays_lost_ends_the_trainer_for_good(client: BufferClient) -> None:
    client.start(1)
    with pytest.raises(BatchLost, match="batch of step 1 cannot be read any more: the group is gone") as lost:
        client.next(timeout_seconds=30)
    assert lost.value.for_good


@pytest.mark.parametrize("client", [-1], indirect=True)
def test_a_batch_that_the_buffer_refuses_ends_the_trainer_for_good(client: BufferClient) -> None:
    client.start(1)
    with pytest.raises(TrinityError, match="the buffer refuses step 1: path: has 30 rows") as refused:
        client.next(timeout_seconds=30)
    assert refused.value.for_good


@pytest.mark.parametrize("client", [batches._MOST_LOSSES], indirect=True)
def test_a_batch_that_is_there_a_little_later_is_read(client: BufferClient) -> None:
    client.start(1)
    batch = client.next(timeout_seconds=30)
    assert batch is not None
    assert batch.entry.step == 1


@pytest.mark.parametrize("client", [0], indirect=True)
def test_a_checkpoint_whose_batches_were_released_ends_the_trainer_for_good(client: BufferClient) -> None:
    with pytest.raises(BatchLost, match="experience of step 1 was released") as lost:
        client.rewind(0)
    assert lost.value.for_good
