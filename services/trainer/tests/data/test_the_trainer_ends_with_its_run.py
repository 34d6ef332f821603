"""A trainer serves once its checkpoint is loaded, and ends once the last evaluation has ended."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.buffer.v1 import buffer_pb2_grpc
from trinity.trainer import service
from trinity.trainer.data import client as batches
from trinity.trainer.data.client import BufferClient
from trinity.trainer.data.source import Finish
from trinity.trainer.loop import TrainLoop
from trinity.trainer.process.control import Control
from trinity.trainer.process.ranks import Ranks
from trinity.trainer.publishing import NoVersions

pytestmark = pytest.mark.core


class Evaluating(buffer_pb2_grpc.BufferServiceServicer):
    """Its evaluation ends with the fourth question; it is away at the second, and hears of version 40 at the fifth."""

    def __init__(self) -> None:
        self.asked = 0

    def Stats(self, request: pb.StatsRequest, context: grpc.ServicerContext) -> pb.StatsResponse:
        self.asked += 1
        if self.asked == 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "it is started again")
        step = 40 if self.asked > 4 else 39
        return pb.StatsResponse(run=request.run, finished=self.asked >= 4, live_step=step)


@pytest.fixture
def buffer() -> Evaluating:
    return Evaluating()


@pytest.fixture
def client(buffer: Evaluating, monkeypatch: pytest.MonkeyPatch) -> Iterator[BufferClient]:
    monkeypatch.setattr(batches, "_FINISHED_SECONDS", 0.01)
    server = grpc.server(futures.ThreadPoolExecutor(2))
    buffer_pb2_grpc.add_BufferServiceServicer_to_server(buffer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    made = BufferClient(f"127.0.0.1:{port}", "a run")
    yield made
    made.close()
    server.stop(None)


@pytest.mark.parametrize(("served", "asked"), [(39, 4), (40, 5), (-1, 4)])
def test_it_waits_for_the_last_evaluation(client: BufferClient, buffer: Evaluating, served: int, asked: int) -> None:
    """The buffer, which hears later than the trainer that version 40 is LIVE, has finished without it before."""
    client.wait_until_finished(served, lambda: False)
    assert buffer.asked == asked


def test_it_does_not_wait_for_a_version_that_a_rollback_withdrew(
    client: BufferClient, buffer: Evaluating, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_HEARD_SECONDS", 0.5)
    client.wait_until_finished(41, lambda: False)
    assert buffer.asked > 5


def test_it_does_not_wait_when_it_is_stopped(client: BufferClient, buffer: Evaluating) -> None:
    client.wait_until_finished(-1, lambda: buffer.asked == 3)
    assert buffer.asked == 3


def test_it_is_loaded_after_its_checkpoint_and_before_its_first_batch() -> None:
    said: list[str] = []

    class Parts:
        def resume(self) -> tuple[int, int]:
            said.append("resumed")
            return 0, 0

        def open(self, step: int) -> None:
            said.append("opened")
            raise EOFError

    control, parts = Control(), Parts()
    control.on_loaded = lambda: said.append("loaded")
    loop: Any = TrainLoop(control, parts, parts, NoVersions(), parts)  # type: ignore[arg-type]
    with pytest.raises(EOFError):
        loop.run()
    assert said == ["resumed", "loaded", "opened"]


def test_it_is_finished_once_its_last_checkpoint_is_one() -> None:
    states: list[str] = []

    class Parts:
        def resume(self) -> tuple[int, int]:
            return 0, 0

        def open(self, step: int) -> None: ...

        def next(self, step: int) -> Finish:
            return Finish()

        def settle(self) -> None:
            states.append(control.progress.state)

    control, parts = Control(), Parts()
    TrainLoop(control, parts, parts, NoVersions(), parts).run()  # type: ignore[arg-type]
    assert (states, control.progress.state) == (["starting"], "finished")


async def test_it_is_ready_once_the_loop_says_that_all_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = threading.Event()

    def train(plan: object, settings: object, ranks: Ranks, control: Control) -> None:
        assert loaded.wait(60)
        control.on_loaded()

    monkeypatch.setattr(service, "train", train)
    trainer = object.__new__(service.TrainerService)
    trainer.control, trainer.ranks = Control(), Ranks(0, 1, 0)
    trainer._plan = trainer._settings = trainer._training = None  # type: ignore[assignment]
    ready = asyncio.Event()
    work = asyncio.create_task(trainer.work(ready, ""))
    await asyncio.sleep(0.1)
    assert not ready.is_set()
    loaded.set()
    await asyncio.wait_for(ready.wait(), 60)
    await work
