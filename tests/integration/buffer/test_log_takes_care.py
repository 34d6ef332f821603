"""What the log refuses, gives back, keeps and lets go: dead letters, fences, bad entries, a full log, a damaged one."""

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest

from support.fakes.data.experience import make_group, make_task
from support.fakes.peers import FakeTrainer, a_failure, a_group, explorer
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsCluster, NatsServer
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.common.v1 import experience_pb2
from trinity.buffer.state.streams import stream_specs
from trinity.data.experience import Outcome, Task, VersionSpan
from trinity.data.wire import decode_task, encode_outcome
from trinity.explorer.rollout import attempt
from trinity.runtime import headers, names
from trinity.runtime.broker import Broker, Bucket, connect, ensure_streams
from trinity.runtime.errors import EXIT_FOR_GOOD

pytestmark = pytest.mark.core

Started = Callable[..., "contextlib.AbstractAsyncContextManager[tuple[BufferRun, FakeTrainer]]"]


async def letters(trainer: FakeTrainer) -> list[experience_pb2.AttemptFailure]:
    answer = await trainer.buffer.ListDeadLetters(pb.ListDeadLettersRequest(run=trainer.run), timeout=20)
    return list(answer.dead_letters)


async def until(condition: Callable[[pb.StatsResponse], bool], trainer: FakeTrainer, seconds: float = 30) -> Any:
    async with asyncio.timeout(seconds):
        while not condition(stats := await trainer.stats()):
            await asyncio.sleep(0.05)
    return stats


def adds_up(stats: pb.StatsResponse) -> bool:
    return bool(stats.fed == stats.stored + stats.dead_letters + stats.outstanding)


async def retry(trainer: FakeTrainer, *ordinals: int) -> list[int]:
    request = pb.RetryDeadLettersRequest(run=trainer.run, ordinals=ordinals)
    return list((await trainer.buffer.RetryDeadLetters(request, timeout=20)).ordinals)


async def test_retried_tasks_complete_the_counts_and_keep_the_bound_also_over_a_kill(
    started: Started, tmp_path: Path
) -> None:
    broken, seen = {2, 5}, set[str]()

    def answer(task: Task, deliveries: int) -> Outcome:
        if task.ordinal in broken:
            seen.add(task.task_id)
        return a_failure(task, deliveries) if task.task_id in seen else a_group(task, deliveries)

    async with (
        started(synchronizer={"sync_interval": 1}) as (run, trainer),
        explorer(run.nats.url, run.run, answer),
    ):
        await trainer.batch(1)
        assert sorted(letter.task.ordinal for letter in await letters(trainer)) == [2, 5]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await retry(trainer, 2, 3)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert len(await letters(trainer)) == 2
        assert await retry(trainer) == [2, 5]
        stats = await until(lambda s: s.dead_letters == 0, trainer)
        assert adds_up(stats) and not stats.outstanding, "they wait for the next weights"
        run.buffer.kill()
        run.buffer.start()
        await trainer.publish(1, tmp_path / "w1")
        await trainer.batch(2)
        stats = await trainer.stats()
        assert adds_up(stats) and stats.dead_letters == 2, "dead again"
        assert sorted((x.task.ordinal, x.task.requeues) for x in await letters(trainer)) == [(7, 1), (8, 1)]
        broken.clear()
        seen.clear()
        assert await retry(trainer, 8) == [8]
        await trainer.publish(2, tmp_path / "w2")
        await trainer.batch(3)
        assert await retry(trainer) == [7]
        for step in range(3, run.steps):
            await trainer.publish(step, tmp_path / f"w{step}")
            await trainer.batch(step + 1)
        stats, entries = await trainer.stats(), [await trainer.entry(step) for step in range(1, run.steps + 1)]
        assert await letters(trainer) == []
    assert adds_up(stats)
    assert stats.stored == stats.fed == run.steps * run.groups
    assert [[group.staleness_steps for group in entry.groups] for entry in entries] == [[0] * run.groups] * run.steps
    tasks = [group.task_id for entry in entries for group in entry.groups]
    assert len(set(tasks)) == len(tasks)


async def test_where_every_task_dies_of_one_cause_the_run_ends_with_it_and_can_be_mended(started: Started) -> None:
    changes: dict[str, Any] = {"explorer": {"max_retry_times": 0, "max_dead_letters_in_a_row": 6}}
    async with started(steps=2, **changes) as (run, trainer):
        async with explorer(run.nats.url, run.run, a_failure):
            assert await asyncio.to_thread(run.buffer.wait, 60) == EXIT_FOR_GOOD
        (reason,) = [str(event["reason"]) for event in run.buffer.events() if event["event"] == "service.failed"]
        assert "6 tasks in a row died of workflow_error and no group was stored between them" in reason
        assert "on explorer tester: it always fails" in reason
        run.buffer.start()
        async with explorer(run.nats.url, run.run):
            await trainer.batch(2)
        stats = await trainer.stats()
    assert adds_up(stats)
    assert 6 <= stats.dead_letters <= 6 + 16, "and those that were on their way"


async def test_failing_attempts_are_told_with_their_causes(started: Started) -> None:
    def answer(task: Task, deliveries: int) -> Outcome:
        return a_failure(task, deliveries) if task.ordinal % 2 else a_group(task, deliveries)

    changes: dict[str, Any] = {"explorer": {"max_retry_times": 0, "max_dead_letters_in_a_row": 3}}
    async with started(steps=2, **changes) as (run, trainer), explorer(run.nats.url, run.run, answer):
        await trainer.batch(2)
        stats = await trainer.stats()
    assert stats.failure_causes["workflow_error"] == stats.failed_attempts >= 4, "groups came between them"
    assert stats.last_failure == "it always fails"


async def test_a_task_leaves_the_queue_once_the_ledger_has_its_end(started: Started) -> None:
    """A buffer that starts before reads the log again, and judges each entry as the one before did."""
    changes: dict[str, Any] = {
        "data_processor": {"experience_pipeline": {"operators": [{"name": "reward_std_filter"}]}}
    }
    async with started(steps=1, **changes) as (run, trainer), await connect(run.nats.url, "tester") as broker:
        run_names = names.RunNames(run.run)
        await until(lambda stats: stats.fed >= run.groups, trainer)
        fed = await broker.several(run_names.tasks_stream, 1, 2)
        dropped, dead = [decode_task(message.data) for message in fed]
        even = make_group(dropped)
        even = replace(even, experiences=tuple(replace(one, reward=1.0) for one in even.experiences))
        late, failed = a_failure(dropped, 2), [a_failure(dead, deliveries) for deliveries in (1, 2, 3)]
        for outcome in (even, late, *failed, a_group(dead, 4)):
            await attempt.store(broker, run_names, outcome)
        before = await until(lambda stats: stats.duplicates_dropped == 1, trainer)
        await asyncio.sleep(0.5)  # the task would leave the queue
        run.buffer.kill()
        run.buffer.start()
        after = await until(lambda stats: stats.duplicates_dropped == 1, trainer)
        for stats in (before, after):
            assert (stats.stored, stats.dead_letters, stats.failed_attempts) == (1, 1, 3)
            assert dict(stats.dropped) == {"reward_std_filter": 1}
        assert [(letter.task.ordinal, letter.error) for letter in await letters(trainer)] == [(2, "it always fails")]
        async with explorer(run.nats.url, run.run):
            await trainer.batch(1)
        async with asyncio.timeout(20):
            while (await broker.state(run_names.tasks_stream)).first_sequence <= 2:
                await asyncio.sleep(0.05)


async def test_a_dropped_letter_is_gone_and_its_task_stays_counted(started: Started) -> None:
    def answer(task: Task, deliveries: int) -> Outcome:
        return a_failure(task, deliveries) if task.ordinal == 1 else a_group(task, deliveries)

    async with started(steps=1) as (run, trainer), explorer(run.nats.url, run.run, answer):
        await trainer.batch(1)
        with pytest.raises(grpc.aio.AioRpcError, match="the run feeds 0 more until its last step"):
            await retry(trainer, 1)
        answered = await trainer.buffer.DropDeadLetters(pb.DropDeadLettersRequest(run=run.run, ordinals=[1]))
        assert list(answered.ordinals) == [1]
        assert await letters(trainer) == []
        stats = await trainer.stats()
    assert stats.dead_letters == 1
    assert adds_up(stats)


async def test_a_fence_keeps_withdrawn_versions_out_of_later_batches(started: Started, tmp_path: Path) -> None:
    version = 0

    def answer(task: Task, deliveries: int) -> Outcome:
        return make_group(task, version=version, attempt=deliveries)

    changes: dict[str, Any] = {"synchronizer": {"sync_interval": 4}, "steps": 8}
    async with started(**changes) as (run, trainer):
        async with explorer(run.nats.url, run.run, answer):
            await trainer.batch(4)
        await trainer.publish(4, tmp_path / "w4")
        version = 4
        async with explorer(run.nats.url, run.run, answer):
            await until(lambda s: s.stored == 32, trainer)
        fenced = await trainer.buffer.Fence(pb.FenceRequest(run=run.run, versions=[4]), timeout=20)
        written = (await trainer.stats()).ledger_step
        before = [await trainer.entry(step) for step in range(1, written + 1)]
        assert written < 8
        assert fenced.dropped == (8 - written) * run.groups, "what the ledger does not have yet"
        run.buffer.kill()
        run.buffer.start()
        version = 0
        async with explorer(run.nats.url, run.run, answer):
            await trainer.batch(run.steps)
        ledger = [await trainer.entry(step) for step in range(1, run.steps + 1)]
        stats = await trainer.stats()
    assert ledger[:written] == before, "what the ledger has stays"
    assert {g.newest_version for entry in ledger[written:] for g in entry.groups} == {0}
    assert stats.dropped["fenced"] == fenced.dropped
    assert adds_up(stats)


def damaged(task: Task) -> dict[str, bytes]:
    """Entries that must be refused, by the word that the reason holds."""
    good = make_group(task)
    first, *rest = good.experiences

    def group(**changes: Any) -> bytes:
        return encode_outcome(replace(good, experiences=(replace(first, **changes), *rest)))

    text = experience_pb2.Outcome.FromString(encode_outcome(good))
    text.group.experiences[1].token_ids.dtype = "str"

    def changed(change: Callable[[Any], None]) -> bytes:
        message = experience_pb2.Outcome.FromString(encode_outcome(good))
        change(message.group.experiences[0])
        return message.SerializeToString()

    longer = np.append(first.logprobs, np.float32(-1))
    return {
        "logprobs": group(logprobs=np.full_like(first.logprobs, np.nan)),
        "reward": group(reward=float("nan")),
        "elements": group(logprobs=longer),
        "token_ids": text.SerializeToString(),
        "version 9": group(version_spans=(VersionSpan(9, 0, first.response_length),)),
        "task.run": encode_outcome(replace(good, task=replace(task, run="another"))),
        "task.task_id": encode_outcome(replace(good, task=replace(task, task_id="never/fed"))),
        "is not a trinity": b"\xff\xfe nonsense",
        "task.repeat_times": encode_outcome(replace(good, task=replace(task, repeat_times=4000))),
        "truncation": changed(lambda e: setattr(e, "truncation", 9)),
        "info_json": group(info_json="not json"),
        "holds nothing": b"",
    }


async def test_what_cannot_be_right_is_refused_with_its_field_and_the_task_is_a_dead_letter(started: Started) -> None:
    async with started(steps=4) as (run, trainer), connect_to(run) as broker:
        stats = await until(lambda s: s.fed >= 16, trainer)
        run_names = names.RunNames(run.run)
        tasks = [await task_at(broker, run_names, ordinal) for ordinal in range(1, 14)]
        expected = {}
        for task, (reason, data) in zip(tasks, damaged(tasks[0]).items(), strict=False):
            data = list(damaged(task).values())[len(expected)]
            await put(broker, run_names, task.ordinal, data)
            expected[task.ordinal] = reason
        await put(broker, run_names, tasks[12].ordinal, encode_outcome(make_group(tasks[12])), crc="12345")
        expected[tasks[12].ordinal] = "checksum"
        await put(broker, run_names, 99_999, encode_outcome(make_group(make_task(99_999, run=run.run))))
        await put(broker, run_names, -1, b"\x00", crc="x")
        stats = await until(lambda s: s.refused == 2 and s.dead_letters == len(expected), trainer)
        found = {letter.task.ordinal: letter for letter in await letters(trainer)}
        assert set(found) == set(expected)
        for ordinal, reason in expected.items():
            assert reason in found[ordinal].error, (reason, found[ordinal].error)
            assert found[ordinal].cause == "invalid_experience"
            assert found[ordinal].task.task_id == tasks[ordinal - 1].task_id
            readable = ordinal < tasks[12].ordinal and reason not in ("is not a trinity", "holds nothing")
            assert (found[ordinal].explorer_id, found[ordinal].attempt) == (("tester", 1) if readable else ("", 0))
        async with explorer(run.nats.url, run.run):
            await trainer.batch(4)
        stats = await trainer.stats()
    assert adds_up(stats)


@contextlib.asynccontextmanager
async def connect_to(run: BufferRun) -> AsyncIterator[Broker]:
    async with await connect(run.nats.url, "tester") as broker:
        yield broker


async def task_at(broker: Broker, run_names: names.RunNames, sequence: int) -> Task:
    from trinity.api.common.v1 import task_pb2
    from trinity.data.wire import task_from_proto

    return task_from_proto(task_pb2.Task.FromString((await broker.get(run_names.tasks_stream, sequence)).data))


async def put(broker: Broker, run_names: names.RunNames, ordinal: int, data: bytes, crc: str = "") -> None:
    header = {headers.ORDINAL: str(ordinal), headers.CRC32: crc or str(zlib.crc32(data))}
    subject = run_names.experience(names.owner_of("tester"), 0, "sums")
    await broker.publish(subject, data, message_id=f"bad/{ordinal}", headers=header)


async def test_tasks_are_fed_as_far_as_the_log_has_room_and_a_checkpoint_is_asked_for(started: Started) -> None:
    """0.5 MiB of log, and 12 steps of 4 groups of 30 KB each."""
    limit = 0.5 / 1024

    def answer(task: Task, deliveries: int) -> Outcome:
        return make_group(task, response=800)

    changes: dict[str, Any] = {"settings": {"LOG_GIB": str(limit)}, "steps": 12}
    changes["synchronizer"] = {"sync_style": "fully_async", "sync_interval": 1000}
    changes["model"] = {"max_response_tokens": 800}
    async with started(**changes) as (run, trainer):
        async with explorer(run.nats.url, run.run, answer):
            for at in range(1, 13):
                with contextlib.suppress(TimeoutError):
                    await trainer.batch(at, seconds=4)
                    continue
                wanted = await waiting(trainer, at)
                assert wanted.checkpoint_wanted
                assert "full" in wanted.reason
                stats = await trainer.stats()
                assert stats.stored < 12 * run.groups
                request = pb.CommitStepRequest(run=run.run, step=at - 1, oldest_kept_step=at - 1)
                await trainer.buffer.CommitStep(request, timeout=20)
                await trainer.batch(at)
        ledger = [await trainer.entry(at) for at in range(1, 13)]
        stats = await trainer.stats()
    assert [g.ordinal for entry in ledger for g in entry.groups] == list(range(1, 12 * run.groups + 1))
    assert adds_up(stats)
    assert stats.log_limit_bytes <= int(limit * 2**30 * 1.25), "at most once: for groups that took seconds to store"


async def test_a_full_log_holds_the_explorers_and_grows_for_a_batch_that_would_never_fit(started: Started) -> None:
    """4 groups of 150 KB each are a batch; the log takes 0.5 MiB."""
    limit = 0.5 / 1024

    def answer(task: Task, deliveries: int) -> Outcome:
        return make_group(task, response=4000)

    held: list[bool] = []
    changes: dict[str, Any] = {"model": {"max_response_tokens": 4000}}
    async with started(settings={"LOG_GIB": str(limit)}, steps=3, **changes) as (run, trainer):
        async with explorer(run.nats.url, run.run, answer, on_wait=held.append):
            await until(lambda s: s.stored == 3, trainer)
            async with asyncio.timeout(30):  # publishes are refused, and the explorers are told
                while not any(held):
                    await asyncio.sleep(0.05)
            assert (await trainer.stats()).stored == 3
            for at in (1, 2, 3):
                await trainer.batch(at)
                request = pb.CommitStepRequest(run=run.run, step=at, oldest_kept_step=at)
                await trainer.buffer.CommitStep(request, timeout=20)
        stats = await trainer.stats()
        said = [event for event in run.buffer.events() if event["event"] == "buffer.log.grown"]
        assert said
    assert adds_up(stats)
    assert stats.stored == 12
    assert not held[-1]


@pytest.mark.parametrize("storage_bytes", [2_905_000, 2_960_000])
async def test_a_log_that_nats_has_no_room_for_ends_no_run_and_starts_none(storage_bytes: int, tmp_path: Path) -> None:
    """NATS has what the streams of a log of 0.5 MiB reserve, and room for none or one of them to grow; a batch of 4
    groups takes 600 KB."""
    limit = 0.5 / 1024
    store = tmp_path / "nats/store"
    store.mkdir(parents=True)
    limited = f'jetstream {{ store_dir: "{store}", sync_interval: always, max_file_store: {storage_bytes} }}\n'
    server = NatsServer(store.parent, limited)
    server.start()
    changes: dict[str, Any] = {"model": {"max_response_tokens": 4000}}

    def run_of(gib: float) -> BufferRun:
        settings = {"LOG_GIB": str(gib), "LINES_MIB": "1"}
        return BufferRun(tmp_path, server, settings=settings, steps=3, **changes)

    def answer(task: Task, deliveries: int) -> Outcome:
        return make_group(task, response=4000)

    run = run_of(limit).start()
    trainer = run.trainer()
    try:
        await trainer.begin()
        async with explorer(server.url, run.run, answer):
            with contextlib.suppress(TimeoutError):
                await trainer.batch(1, seconds=12)
        assert run.buffer.is_running()
        assert (await trainer.stats()).log_limit_bytes == int(limit * 2**30)
        (said,) = [event for event in run.buffer.events() if event["event"] == "buffer.log.growth_refused"]
        assert "TRINITY_BUFFER_LOG_GIB" in str(said["reason"])
        run.buffer.kill()
        larger = run_of(2 * limit).buffer
        larger.start(wait_seconds=0)
        assert await asyncio.to_thread(larger.wait, 60) == 1
        (reason,) = [str(event["reason"]) for event in run.buffer.events() if event["event"] == "service.failed"]
        assert f"stream {names.RunNames(run.run).experiences_stream} of up to {2**20} bytes" in reason
        run.buffer.start()
    finally:
        await trainer.close()
        run.stop()
        server.kill()


async def waiting(trainer: FakeTrainer, step: int) -> pb.Waiting:
    call = trainer.buffer.StreamBatches(pb.StreamBatchesRequest(run=trainer.run, from_step=step), timeout=20)
    async for part in call:
        if part.HasField("waiting"):
            call.cancel()
            return part.waiting
    raise AssertionError("the buffer did not say what it waits for")


async def test_nothing_that_a_checkpoint_or_an_archive_needs_is_let_go(started: Started, tmp_path: Path) -> None:
    """The log is cut at once here; large groups lie beside it, and go with it."""

    def answer(task: Task, deliveries: int) -> Outcome:
        return make_group(task, version=task.gate_step, response=300_000 if task.ordinal % 4 == 1 else 8)

    source = {"path": str(tmp_path / "archive/kept.jsonl")}
    changes: dict[str, Any] = {"buffer": {"trainer_input": {"experience_buffer": source}, "batch_size": 4}}
    changes["buffer"]["total_steps"] = 4
    changes["synchronizer"] = {"sync_interval": 1}
    changes["model"] = {"max_response_tokens": 300_000}
    async with started(**changes) as (run, trainer), connect_to(run) as broker:
        run_names = names.RunNames(run.run)
        async with explorer(run.nats.url, run.run, answer):
            for step in range(1, 5):
                await trainer.batch(step)
                await trainer.publish(step, tmp_path / f"w{step}")
        await until(lambda s: s.archive_behind == 0, trainer)
        blobs = (await broker.state(run_names.blobs_stream)).messages
        request = pb.CommitStepRequest(run=run.run, step=3, oldest_kept_step=2)
        answered = await trainer.buffer.CommitStep(request, timeout=20)
        assert answered.oldest_step == 3
        assert (await broker.state(run_names.blobs_stream)).messages < blobs
        first = (await broker.state(run_names.experiences_stream)).first_sequence
        needed = [g.log_sequence for step in (3, 4) for g in (await trainer.entry(step)).groups]
        assert 1 < first <= min(needed)
        run.buffer.kill()
        run.buffer.start()
        assert len(await trainer.batch(3)) == len(await trainer.batch(4)) == 4 + 2


async def test_a_hole_in_the_log_stops_the_buffer_with_its_name(started: Started) -> None:
    async with started(steps=2) as (run, trainer), connect_to(run) as broker:
        await until(lambda s: s.fed >= 8, trainer)
        run.buffer.kill()
        run_names = names.RunNames(run.run)
        for ordinal in range(1, 9):
            task = await task_at(broker, run_names, ordinal)
            await attempt.store(broker, run_names, make_group(task))
        await broker.delete(run_names.experiences_stream, 3)
        run.buffer.start(wait_seconds=0)
        assert await asyncio.to_thread(run.buffer.wait, 60) == 1
        reasons = [str(event["reason"]) for event in run.buffer.events() if event["event"] == "service.failed"]
        assert run_names.experiences_stream in reasons[0]
        assert "3 to 3 are missing" in reasons[0]
        await trainer.close()


async def test_in_a_cluster_everything_has_three_replicas_unless_told_otherwise(tmp_path: Path) -> None:
    with NatsCluster(tmp_path) as cluster:
        async with await connect(cluster.url, "tester", wait_seconds=60) as broker:
            assert broker.usual_replicas == 3
            run_names = names.RunNames("three")
            await ensure_streams(broker, stream_specs(run_names, log_bytes=2**20, replicas=0))
            await Bucket.open(broker, "three")
            infos = await broker.js.streams_info()
            assert {info.config.num_replicas for info in infos} == {3}
            await ensure_streams(broker, stream_specs(run_names, log_bytes=2**20, replicas=1))
            info = await broker.js.stream_info(run_names.experiences_stream)
            assert info.config.num_replicas == 1, "settings are brought up to date"
