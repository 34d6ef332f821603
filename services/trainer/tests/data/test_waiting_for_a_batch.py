"""The buffer hears when the trainer can do nothing but wait: until then its time limits must not run."""

import queue
import time
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.buffer.v1 import buffer_pb2_grpc
from trinity.trainer.data.client import BufferClient

pytestmark = pytest.mark.core

Parts = list[pb.BatchPart]


class Buffer(buffer_pb2_grpc.BufferServiceServicer):
    """Streams the parts that it is given, whichever step is asked for. It waits between batches, not within one."""

    def __init__(self) -> None:
        self.parts: queue.Queue[pb.BatchPart] = queue.Queue()
        self.asked: list[tuple[int, bool]] = []

    def StreamBatches(self, request: pb.StreamBatchesRequest, context: grpc.ServicerContext) -> Iterator[pb.BatchPart]:
        assert request.HasField("waits")
        self.asked.append((request.from_step, request.waits))
        part = pb.BatchPart(end=pb.BatchEnd())
        while context.is_active():
            try:
                part = self.parts.get(timeout=0.02)
                yield part
            except queue.Empty:
                if part.HasField("end"):
                    yield pb.BatchPart(waiting=pb.Waiting())

    def give(self, parts: Parts) -> None:
        for part in parts:
            self.parts.put(part)

    def was_asked(self, *asked: tuple[int, bool]) -> bool:
        """Soon."""
        end = time.monotonic() + 20
        while self.asked != [*asked] and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)
        return self.asked == [*asked]


def entry(step: int) -> pb.BatchPart:
    return pb.BatchPart(entry=pb.LedgerEntry(step=step))


def end(step: int) -> pb.BatchPart:
    return pb.BatchPart(end=pb.BatchEnd(step=step))


def step_of(client: BufferClient) -> int:
    batch = client.next(timeout_seconds=20)
    assert batch is not None
    return batch.entry.step


@pytest.fixture
def buffer() -> Buffer:
    return Buffer()


@pytest.fixture
def client(buffer: Buffer) -> Iterator[BufferClient]:
    server = grpc.server(futures.ThreadPoolExecutor(8))
    buffer_pb2_grpc.add_BufferServiceServicer_to_server(buffer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    made = BufferClient(f"127.0.0.1:{port}", "a run")
    made.start(1)
    yield made
    made.close()
    server.stop(None)


def test_it_is_told_once_for_each_step_that_is_waited_for(buffer: Buffer, client: BufferClient) -> None:
    assert buffer.was_asked((1, False))
    for _ in range(3):
        assert client.next(timeout_seconds=0.01) is None
    assert buffer.was_asked((1, False), (1, True))
    buffer.give([entry(1), end(1), entry(2), end(2)])
    assert step_of(client) == 1
    assert step_of(client) == 2, "it was there already"
    assert buffer.was_asked((1, False), (1, True)), "the trainer trains"
    assert client.next(timeout_seconds=0.01) is None
    assert buffer.was_asked((1, False), (1, True), (3, True))
    buffer.give([entry(3), end(3)])
    assert step_of(client) == 3


def test_a_batch_that_is_on_its_way_is_not_broken_off(buffer: Buffer, client: BufferClient) -> None:
    assert buffer.was_asked((1, False))
    buffer.give([entry(1)])
    time.sleep(0.01)
    while not client._receives:
        time.sleep(0.005)
    time.sleep(0.1)  # the buffer has nothing to give meanwhile
    assert client.next(timeout_seconds=0.01) is None
    buffer.give([end(1)])
    assert step_of(client) == 1
    assert buffer.was_asked((1, False))
