"""A buffer that only reads, beside the run's own one and after it: it serves the same, and changes nothing."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from support.fakes.peers import FakeTrainer, explorer
from support.programs.forked_run import ForkedService
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.runtime import names
from trinity.runtime.broker import connect

pytestmark = pytest.mark.core


@pytest.fixture
async def run(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[BufferRun]:
    """A run whose six steps were taken."""
    started = BufferRun(tmp_path, nats_server).start()
    trainer = started.trainer()
    await trainer.begin()
    async with explorer(started.nats.url, started.run):
        for step in range(1, started.steps + 1):
            await trainer.batch(step)
    await trainer.close()
    yield started
    started.stop()


@pytest.fixture
async def reader(run: BufferRun, tmp_path: Path) -> AsyncIterator[FakeTrainer]:
    """A client of a buffer that only reads."""
    folder = tmp_path / "reader"
    folder.mkdir()
    process = ForkedService(
        "buffer", folder, CONFIG_FILE=str(run.config_file), NATS_URL=run.nats.url, READ_ONLY="1"
    ).start()
    client = FakeTrainer(run.run, process.address, run.sync.address)
    yield client
    await client.close()
    process.kill()


async def _stored(run: BufferRun) -> dict[str, tuple[int, int]]:
    """First and last sequence of every stream of the broker, but of what a live buffer renews or logs."""
    async with await connect(run.nats.url, "look") as broker:
        infos = await broker.js.streams_info()
        found = {str(info.config.name): (info.state.first_seq, info.state.last_seq) for info in infos}
        others = (f"KV_{names.ANNOUNCEMENTS_BUCKET}", names.RunNames(run.run).lines_stream)
        return {name: sequences for name, sequences in found.items() if name not in others}


async def test_it_serves_the_same_bytes_and_changes_nothing(run: BufferRun, reader: FakeTrainer) -> None:
    owner = run.trainer()
    before = await _stored(run)
    for step in (1, 4, run.steps):
        assert await reader.batch(step) == await owner.batch(step)
        assert await reader.entry(step) == await owner.entry(step)
    theirs, ours = await owner.stats(), await reader.stats()
    for name in ("fed", "stored", "dead_letters", "outstanding", "ledger_step", "sampled_tokens"):
        assert getattr(ours, name) == getattr(theirs, name), name
    answer = await reader.buffer.Rewind(pb.RewindRequest(run=run.run, step=2))
    assert answer.newest_step == run.steps
    assert not (await reader.buffer.ListDeadLetters(pb.ListDeadLettersRequest(run=run.run))).dead_letters
    assert await _stored(run) == before
    await owner.close()


async def test_it_serves_a_run_whose_processes_are_gone(run: BufferRun, reader: FakeTrainer) -> None:
    run.stop()
    assert len(await reader.batch(run.steps)) == run.groups + 2


async def test_the_stream_ends_after_the_newest_entry(run: BufferRun, reader: FakeTrainer) -> None:
    call = reader.buffer.StreamBatches(pb.StreamBatchesRequest(run=run.run, from_step=run.steps - 1), timeout=30)
    parts = [part async for part in call]
    assert [part.end.step for part in parts if part.HasField("end")] == [run.steps - 1, run.steps]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reader.batch(run.steps + 1)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert f"the newest is {run.steps}" in str(caught.value.details())


async def test_it_refuses_what_would_change_the_run(run: BufferRun, reader: FakeTrainer) -> None:
    stub, about = reader.buffer, {"run": run.run}
    calls = [
        stub.CommitStep(pb.CommitStepRequest(step=2, oldest_kept_step=1, **about)),
        stub.PublishTasks(pb.PublishTasksRequest(**about)),
        stub.RetryDeadLetters(pb.RetryDeadLettersRequest(**about)),
        stub.DropDeadLetters(pb.DropDeadLettersRequest(**about)),
        stub.Fence(pb.FenceRequest(versions=[1], **about)),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "only reads" in str(caught.value.details())


async def test_released_experience_is_said_with_the_lowest_step_that_can_be_trained(
    run: BufferRun, reader: FakeTrainer
) -> None:
    owner = run.trainer()
    for committed in (2, 4):  # what no kept checkpoint needs goes: LOG_KEEP_GIB is 0
        await owner.buffer.CommitStep(pb.CommitStepRequest(run=run.run, step=committed, oldest_kept_step=committed))
    async with await connect(run.nats.url, "look") as broker:
        assert (await broker.state(names.RunNames(run.run).experiences_stream)).first_sequence > 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reader.buffer.Rewind(pb.RewindRequest(run=run.run, step=0))
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    lowest = int(str(caught.value.details()).rpartition(" ")[2])
    assert 1 < lowest <= 5
    await reader.buffer.Rewind(pb.RewindRequest(run=run.run, step=lowest - 1))
    assert len(await reader.batch(lowest)) == run.groups + 2
    with pytest.raises(grpc.aio.AioRpcError):
        await reader.batch(lowest - 1)
    await owner.close()


async def test_a_run_that_never_was_is_not_made(nats_server: NatsServer, tmp_path: Path) -> None:
    unborn = BufferRun(tmp_path, nats_server)
    process = ForkedService(
        "buffer", tmp_path, CONFIG_FILE=str(unborn.config_file), NATS_URL=nats_server.url, READ_ONLY="1"
    ).start(wait_seconds=0)
    assert process.wait(60) == 1
    assert f"knows no run '{unborn.run}'" in str(process.events()[-1])
    assert await _stored(unborn) == {}


async def test_a_skipped_step_is_served_without_its_groups_by_every_buffer_from_then_on(
    run: BufferRun, reader: FakeTrainer
) -> None:
    owner = run.trainer()
    before = await owner.entry(5)
    request = pb.SkipStepRequest(run=run.run, step=5, reason="a group cannot be decoded")
    for wrong, code in (
        (pb.SkipStepRequest(run=run.run, step=99, reason="x"), grpc.StatusCode.NOT_FOUND),
        (pb.SkipStepRequest(run=run.run, step=5), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.SkipStepRequest(run=run.run, step=5, reason="x" * 501), grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await owner.buffer.SkipStep(wrong, timeout=20)
        assert refused.value.code() is code
    stream = owner.buffer.StreamBatches(pb.StreamBatchesRequest(run=run.run, from_step=5))
    await stream.read()
    with pytest.raises(grpc.aio.AioRpcError, match="is being read by a trainer"):
        await owner.buffer.SkipStep(request, timeout=20)
    stream.cancel()
    skipped = (await reader.buffer.SkipStep(request, timeout=20)).entry
    assert skipped.skip_reason == "a group cannot be decoded"
    assert list(skipped.groups) == list(before.groups), "they stay counted"
    run.buffer.kill()
    run.buffer.start()
    again = pb.SkipStepRequest(run=run.run, step=5, reason="another reason")
    assert (await owner.buffer.SkipStep(again, timeout=20)).entry.skip_reason == "a group cannot be decoded"
    for client in (owner, reader):
        parts = [pb.BatchPart.FromString(part).WhichOneof("part") for part in await client.batch(5)]
        assert parts == ["entry", "end"]
        assert len(await client.batch(6)) == 2 + run.groups
    stats = await owner.stats()
    assert list(stats.skipped_steps) == [5]
    assert stats.fed == stats.stored + stats.dead_letters + stats.outstanding
    await owner.buffer.CommitStep(pb.CommitStepRequest(run=run.run, step=6, oldest_kept_step=6), timeout=20)
    with pytest.raises(grpc.aio.AioRpcError, match="a checkpoint of step 6 holds it"):
        await owner.buffer.SkipStep(pb.SkipStepRequest(run=run.run, step=6, reason="late"), timeout=20)
    await owner.close()
