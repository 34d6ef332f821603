"""Foreign data in a stream, a bucket or a blob: buffer and sync continue, report what they refused, and start again."""

import asyncio
import random
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.fakes.data.experience import make_group
from support.fakes.peers import FakeTrainer, explorer
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.common.v1 import experience_pb2, task_pb2
from trinity.buffer.state.streams import stream_specs
from trinity.data.experience import AttemptFailure
from trinity.data.wire import encode_outcome, encode_reference, fill_group, task_from_proto
from trinity.runtime import headers, names
from trinity.runtime.broker import Broker, Bucket, StreamSpec, blobs, check_stream, connect, ensure_streams
from trinity.runtime.errors import Conflict, FailureCause, NotFound

pytestmark = pytest.mark.core

STEPS = 4
TESTER = names.owner_of("tester")


@pytest.fixture
async def attacked(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[tuple[BufferRun, FakeTrainer, Broker]]:
    taskset: dict[str, Any] = {"name": "eval", "path": str(tmp_path / "data"), "split": "test"}
    taskset["format"] = {"prompt_key": "question", "response_key": "answer"}
    sums = {**taskset, "name": "sums", "split": "train"}
    changes: dict[str, Any] = {
        "buffer": {"explorer_input": {"taskset": sums, "eval_tasksets": [taskset]}, "batch_size": 4,
                   "total_steps": STEPS},
        "explorer": {"eval_interval": 100, "max_retry_times": 2},
    }  # fmt: skip
    run = BufferRun(tmp_path, nats_server, steps=STEPS, **changes).start()
    trainer = run.trainer()
    async with await connect(nats_server.url, "attacker") as broker:
        try:
            await trainer.begin()
            yield run, trainer, broker
        finally:
            await trainer.close()
            run.stop()


def subjects(run: str) -> list[str]:
    one = names.RunNames(run)
    return [
        one.task("sums", 1), one.task("sums", 900), one.evaluation_task("eval"), one.experience(TESTER, 0, "sums"),
        one.experience(TESTER, 0, "sums", blob=True), one.failure(TESTER, "sums"), one.control,
        one.evaluation(TESTER, "eval"), one.batch(1), one.batch(2), one.batch(900), one.cursor, one.dead_letter(1),
        one.dead_letter(900), one.blob(TESTER, "0" * 32, 0),
    ]  # fmt: skip


def bodies(run: str) -> list[bytes]:
    """Bytes of other kinds than a subject's own, and its own kind with fields that cannot be right."""
    task = task_pb2.Task(run=run, task_id="x", ordinal=1, workflow="w", repeat_times=1, max_attempts=1)
    task.kind, task.timeout_seconds, task.taskset, task.evaluation_step = task_pb2.TASK_KIND_EVALUATION, 1, "eval", -3
    outcome = experience_pb2.Outcome()
    outcome.failure.task.CopyFrom(task)
    outcome.failure.cause = "no such cause"
    reference = experience_pb2.BlobReference(key="> *", size_bytes=2**40, chunks=2**31 - 1)
    entry = pb.LedgerEntry(run="another", step=1)
    return [
        b"", b"\xff\xfe", b"\x08\x01", random.Random(0).randbytes(300), task.SerializeToString(),
        outcome.SerializeToString(), experience_pb2.Outcome(blob=reference).SerializeToString(),
        entry.SerializeToString(), pb.LedgerEntry(run=run, step=900).SerializeToString(),
        experience_pb2.Outcome(fence=experience_pb2.Fence(versions=[-1])).SerializeToString(),
        experience_pb2.Outcome(requeue=experience_pb2.Requeue(task=task)).SerializeToString(),
        experience_pb2.AttemptFailure(task=task).SerializeToString(),
    ]  # fmt: skip


async def attack(broker: Broker, run: str, mark: str) -> int:
    sent = 0
    marks = {headers.FED: "x", headers.POSITION: "-1", headers.EVALUATION_STEP: "9" * 40, headers.ORDINAL: "-5"}
    for subject in subjects(run):
        for body in bodies(run):
            for header in ({}, marks):
                await broker.publish(subject, body, message_id=f"{mark}/{sent}", headers=dict(header))
                sent += 1
    return sent


async def test_a_run_with_garbage_on_every_subject_goes_on_and_starts_again(
    attacked: tuple[BufferRun, FakeTrainer, Broker],
) -> None:
    run, trainer, broker = attacked
    one = names.RunNames(run.run)
    runs, versions = await Bucket.open(broker, names.RUNS_BUCKET), await Bucket.open(broker, names.VERSIONS_BUCKET)
    await attack(broker, run.run, "before")
    async with explorer(run.nats.url, run.run):
        await trainer.batch(1)
        await attack(broker, run.run, "live")
        for bucket, key in ((runs, one.commit_key), (versions, one.live_key), (versions, one.version_key(0))):
            await bucket.update(key, lambda _: b"[1, 2")
        await trainer.batch(2)
        first = [await trainer.entry(step) for step in (1, 2)]
        run.buffer.kill()
        await attack(broker, run.run, "down")
        run.buffer.start()
        assert [await trainer.entry(step) for step in (1, 2)] == first
        for step in range(3, STEPS + 1):
            await trainer.batch(step)
        async with asyncio.timeout(60):
            while (stats := await trainer.stats()).evaluations_outstanding or not stats.evaluations:
                await asyncio.sleep(0.1)
    stats = await trainer.stats()
    assert stats.ledger_step == STEPS
    assert stats.fed == stats.stored + stats.dead_letters + stats.outstanding
    assert stats.refused > 100
    assert [e.taskset for e in stats.evaluations] == ["eval"]
    assert (await trainer.buffer.ListDeadLetters(pb.ListDeadLettersRequest(run=run.run), timeout=20)) is not None
    told = {event["event"] for event in run.buffer.events()}
    assert {"buffer.log.refused", "buffer.stream.skipped", "buffer.evaluation.refused"} <= told
    assert "service.failed" not in told


async def test_blobs_that_contradict_their_reference_are_dead_letters(
    attacked: tuple[BufferRun, FakeTrainer, Broker],
) -> None:
    run, trainer, broker = attacked
    one = names.RunNames(run.run)
    async with asyncio.timeout(30):
        while (await trainer.stats()).fed < 8:
            await asyncio.sleep(0.05)
    tasks = [task_pb2.Task.FromString((await broker.get(one.tasks_stream, s)).data) for s in range(1, 9)]
    good = encode_outcome(make_group(task_from_proto(tasks[0])))
    sound = await blobs.store(broker, one, TESTER, good)
    inner = await blobs.store(broker, one, TESTER, encode_reference(sound))
    fence = experience_pb2.Outcome(fence=experience_pb2.Fence(versions=[1]))
    fenced = await blobs.store(broker, one, TESTER, fence.SerializeToString())
    under_control = encode_reference(sound)
    await broker.publish(one.control, under_control, message_id="of-no-explorer")

    def changed(**values: Any) -> names.BlobReference:
        return replace(sound, **values)

    wrong = [
        ("another checksum", changed(crc32=1)), ("blob.chunks", changed(chunks=3_000_000)),
        ("blob.chunks", changed(chunks=2**31 - 1)), ("blob.size_bytes", changed(size_bytes=2**50, chunks=2**31 - 1)),
        ("blob.key", changed(key="a b")), ("blob: holds blob", inner), ("blob: holds fence", fenced),
        ("is not there", changed(key="0" * 32)),
    ]  # fmt: skip
    for task, (_, reference) in zip(tasks, wrong, strict=True):
        data = encode_reference(reference)
        header = {headers.ORDINAL: str(task.ordinal), headers.CRC32: str(zlib.crc32(data))}
        subject = one.experience(TESTER, 0, "sums", blob=True)
        await broker.publish(subject, data, message_id=f"b{task.ordinal}", headers=header)
    async with asyncio.timeout(30):
        while (await trainer.stats()).dead_letters < len(wrong):
            await asyncio.sleep(0.05)
    answer = await trainer.buffer.ListDeadLetters(pb.ListDeadLettersRequest(run=run.run), timeout=20)
    found = {letter.task.ordinal: letter.error for letter in answer.dead_letters}
    for ordinal, (reason, _) in enumerate(wrong, start=1):
        assert reason in found[ordinal], (reason, found[ordinal])


async def test_entries_of_a_task_that_say_what_cannot_be_are_its_dead_letters(
    attacked: tuple[BufferRun, FakeTrainer, Broker],
) -> None:
    run, trainer, broker = attacked
    one = names.RunNames(run.run)
    async with asyncio.timeout(30):
        while (await trainer.stats()).fed < 4:
            await asyncio.sleep(0.05)
    tasks = [task_pb2.Task.FromString((await broker.get(one.tasks_stream, s)).data) for s in range(1, 5)]
    changed, of_no_task = experience_pb2.Outcome(), experience_pb2.Outcome()
    fill_group(changed.group, make_group(task_from_proto(tasks[0])))
    changed.group.task.sampling.temperature = 0.25
    fill_group(of_no_task.group, make_group(task_from_proto(tasks[1])))
    of_no_task.group.task.ordinal = -1
    failed = AttemptFailure(task_from_proto(tasks[2]), 1, "tester", FailureCause.TIMEOUT, "late", False, 1.0)
    long, late = (experience_pb2.Outcome.FromString(encode_outcome(failed)) for _ in range(2))
    long.failure.error = "x" * 100_000
    late.failure.task.CopyFrom(tasks[3])
    late.failure.failed_at_seconds = 1e308
    group, failure = one.experience(TESTER, 0, "sums"), one.failure(TESTER, "sums")
    sent = [
        (group, changed, "task.sampling"),
        (group, of_no_task, "task.ordinal: is -1"),
        (failure, long, "failure.error: has 100000 characters"),
        (failure, late, "failure.failed_at_seconds: is 1e+308"),
    ]
    for ordinal, (subject, outcome, _) in enumerate(sent, start=1):
        header = {headers.ORDINAL: str(ordinal)}
        await broker.publish(subject, outcome.SerializeToString(), message_id=f"c{ordinal}", headers=header)
    async with asyncio.timeout(30):
        while (await trainer.stats()).dead_letters < len(sent):
            await asyncio.sleep(0.05)
    answer = await trainer.buffer.ListDeadLetters(pb.ListDeadLettersRequest(run=run.run), timeout=20)
    found = {letter.task.ordinal: letter for letter in answer.dead_letters}
    for ordinal, (_, _, reason) in enumerate(sent, start=1):
        assert reason in found[ordinal].error, (reason, found[ordinal].error)
        assert found[ordinal].explorer_id == "tester"


async def test_entries_under_the_subject_of_another_explorer_are_dead_letters(
    attacked: tuple[BufferRun, FakeTrainer, Broker],
) -> None:
    run, trainer, broker = attacked
    one, other = names.RunNames(run.run), names.owner_of("other")
    async with asyncio.timeout(30):
        while (await trainer.stats()).fed < 4:
            await asyncio.sleep(0.05)
    tasks = [task_pb2.Task.FromString((await broker.get(one.tasks_stream, s)).data) for s in range(1, 5)]
    group = encode_outcome(make_group(task_from_proto(tasks[0])))
    in_blob = encode_outcome(make_group(task_from_proto(tasks[1])))
    reference = encode_reference(await blobs.store(broker, one, other, in_blob))
    failed = AttemptFailure(task_from_proto(tasks[2]), 1, "tester", FailureCause.TIMEOUT, "late", False, 1.0)
    requeue = experience_pb2.Outcome(requeue=experience_pb2.Requeue(task=tasks[3])).SerializeToString()
    sent = [
        (one.experience(other, 0, "sums"), group), (one.experience(other, 0, "sums", blob=True), reference),
        (one.failure(other, "sums"), encode_outcome(failed)), (one.experience(other, 0, "sums"), requeue),
    ]  # fmt: skip
    for ordinal, (subject, data) in enumerate(sent, start=1):
        header = {headers.ORDINAL: str(ordinal), headers.CRC32: str(zlib.crc32(data))}
        await broker.publish(subject, data, message_id=f"o{ordinal}", headers=header)
    async with asyncio.timeout(30):
        while (await trainer.stats()).dead_letters < len(sent):
            await asyncio.sleep(0.05)
    answer = await trainer.buffer.ListDeadLetters(pb.ListDeadLettersRequest(run=run.run), timeout=20)
    found = {letter.task.ordinal: letter for letter in answer.dead_letters}
    for ordinal in (1, 2, 3):
        assert found[ordinal].explorer_id == "tester"
        assert f"explorer_id: is 'tester', but the entry lies under the subject of {other}" in found[ordinal].error
    assert f"subject: is {one.experience(other, 0, 'sums')}; a requeue is the buffer's own" in found[4].error


async def test_a_run_with_the_older_subjects_is_refused(tmp_path: Path, nats_server: NatsServer) -> None:
    run = BufferRun(tmp_path, nats_server)
    one = names.RunNames(run.run)
    async with await connect(nats_server.url, "older") as broker:
        await ensure_streams(broker, [StreamSpec(one.experiences_stream, (one.subjects("experiences"),))])
        with pytest.raises(Conflict, match=f"stream {one.experiences_stream} of another version of Trinity"):
            await ensure_streams(broker, stream_specs(one, log_bytes=1000, replicas=1))
        with pytest.raises(Conflict, match=r"subjects is .*; it was left as it is"):
            await check_stream(broker, StreamSpec(one.experiences_stream, one.log_subjects))
        with pytest.raises(NotFound):
            await check_stream(broker, StreamSpec("NONE", ("none.>",)))
