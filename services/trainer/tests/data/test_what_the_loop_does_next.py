"""The command that follows a step: for one rank as it is, for several as bytes; and in which order requests count."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from support.programs.trainer.releases import raw_batch
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.runtime.errors import DataLoss
from trinity.trainer.data import source
from trinity.trainer.data.client import RawBatch
from trinity.trainer.data.source import BatchSource, Command, Finish, RollBack, Save, Skip, Stop, Train
from trinity.trainer.process.control import Control
from trinity.trainer.process.exchange import Exchange
from trinity.trainer.process.ranks import Ranks
from trinity.trainer.process.times import StepTimes

pytestmark = pytest.mark.core

LAST = 5


class Buffer:
    waiting_for = ""
    checkpoint_wanted = False

    def __init__(self, *batches: RawBatch) -> None:
        self.batches = list(batches)
        self.started: list[int] = []

    def rewind(self, step: int) -> pb.RewindResponse:
        return pb.RewindResponse(last_step=LAST)

    def start(self, from_step: int) -> None:
        self.started.append(from_step)

    def next(self, timeout_seconds: float) -> RawBatch | None:
        return self.batches.pop(0) if self.batches else None


def opened(buffer: Buffer, step: int, due: Callable[[int], bool] = lambda _: False) -> tuple[BatchSource, Control]:
    control, given = Control(), buffer
    exchange = Exchange(Ranks(0, 1, 0))
    batches = BatchSource(exchange, control, given, StepTimes(), due)  # type: ignore[arg-type]
    batches.open(step)
    return batches, control


def skip_of(step: int) -> RawBatch:
    return RawBatch(pb.LedgerEntry(step=step, skip_reason="a bad group"))


def test_a_single_rank_gets_the_batch_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a single rank encodes nothing")

    monkeypatch.setattr(source, "encode_batch", refuse)
    monkeypatch.setattr(source, "decode_batch", refuse)
    monkeypatch.setattr(Exchange, "_bytes", refuse)
    raw, passed = raw_batch(3), skip_of(4)
    buffer = Buffer(raw, passed)
    batches, _ = opened(buffer, 2)
    trained, skipped = batches.next(2), batches.next(3)
    assert isinstance(trained, Train) and trained.batch is raw
    assert isinstance(skipped, Skip) and skipped.batch is passed
    assert buffer.started == [3], "it reads ahead once"


@pytest.mark.parametrize(
    "command", [Train(raw_batch(3)), Skip(skip_of(3)), Save(), RollBack(), Stop()], ids=lambda c: type(c).__name__
)
def test_every_command_reaches_other_ranks(command: Command) -> None:
    assert source._decode(source._encode(command)) == command


def test_a_rollback_counts_before_a_batch_and_a_checkpoint() -> None:
    batches, control = opened(Buffer(raw_batch(3)), 2, lambda step: step == 2)
    control.request_checkpoint()
    assert batches.next(2) == RollBack()


def test_a_checkpoint_is_saved_on_request_where_there_is_none() -> None:
    batches, control = opened(Buffer(raw_batch(3)), 2)
    control.request_checkpoint()
    assert batches.next(2) == Save()
    control.update(saved_step=2)
    control.request_checkpoint()
    assert isinstance(batches.next(2), Train)


def test_a_pause_delays_the_next_batch_alone() -> None:
    """A checkpoint is saved, and a rollback made, all the same."""
    due = [False, True]
    batches, control = opened(Buffer(raw_batch(3)), 2, lambda _: bool(due) and due.pop(0))
    control.pause()
    control.request_checkpoint()
    limit = threading.Timer(20, control.stop)
    limit.start()
    assert batches.next(2) == Save()
    control.update(saved_step=2)
    assert batches.next(2) == RollBack()
    threading.Timer(0.2, control.resume).start()
    assert isinstance(batches.next(2), Train)
    limit.cancel()


def test_it_stops_before_the_next_batch() -> None:
    batches, control = opened(Buffer(raw_batch(3)), 2)
    control.stop()
    assert batches.next(2) == Stop()


def test_after_the_last_step_only_a_rollback_is_left() -> None:
    due = [True, False]
    batches, _ = opened(Buffer(), LAST, lambda _: due.pop(0))
    assert (batches.next(LAST), batches.next(LAST)) == (RollBack(), Finish())


def test_the_batch_of_another_step_is_refused() -> None:
    batches, _ = opened(Buffer(raw_batch(4)), 2)
    with pytest.raises(DataLoss, match="sent step 4, step 3 was requested"):
        batches.next(2)
