"""The thin layer around nats-py: every publish resolves, refusals are back-pressure, gaps and losses are loud."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from support.servers.nats import NatsServer
from trinity.runtime import names
from trinity.runtime.broker import (
    Broker,
    Bucket,
    Gap,
    PublishRefused,
    PullConsumer,
    SequenceConflict,
    StreamSpec,
    blobs,
    connect,
    consume,
    ensure_consumer,
    ensure_streams,
    tail,
)
from trinity.runtime.errors import Full, InvalidInput, NotFound, PermissionDenied, Unavailable
from trinity.runtime.process import free_port

pytestmark = pytest.mark.core


@pytest.fixture
async def broker(nats_url: str) -> AsyncIterator[Broker]:
    async with await connect(nats_url, "test") as connected:
        await ensure_streams(connected, [StreamSpec("S", ("s.>",)), StreamSpec("FULL", ("f",), max_bytes=2000)])
        yield connected


async def test_the_same_message_id_is_stored_once(broker: Broker) -> None:
    first = await broker.publish("s.a", b"1", message_id="one")
    again = await broker.publish("s.a", b"1", message_id="one")
    assert (again.sequence, again.duplicate) == (first.sequence, True)
    assert (await broker.state("S")).messages == 1


async def test_a_full_stream_refuses_and_loses_nothing(broker: Broker) -> None:
    stored = 0
    with pytest.raises(PublishRefused):
        for index in range(10):
            await broker.publish("f", bytes(500), message_id=str(index), deadline_seconds=1.0)
            stored += 1
    assert (await broker.state("FULL")).messages == stored > 0
    await broker.purge_below("FULL", stored + 1)
    await broker.publish("f", bytes(500), message_id="later", deadline_seconds=5.0)


@pytest.mark.parametrize("name", ["S", "NEW"])
async def test_a_limit_that_the_server_cannot_hold_is_named_with_its_setting(broker: Broker, name: str) -> None:
    """Of a stream that is there, and of a new one."""
    spec = StreamSpec(name, (f"{name.lower()}.>",), max_bytes=2**50, setting="SIZE")
    with pytest.raises(Full, match=rf"stream {name} of up to {2**50} bytes: insufficient .*; lower SIZE, or give NATS"):
        await ensure_streams(broker, [spec])
    assert (await broker.state("S")).max_bytes == -1


async def test_append_goes_to_exactly_the_next_place(broker: Broker) -> None:
    assert await broker.append("s.a", "S", b"1", message_id="a", last_sequence=0) == 1
    assert await broker.append("s.a", "S", b"1", message_id="a", last_sequence=0) == 1  # the answer was lost: again
    with pytest.raises(SequenceConflict):
        await broker.append("s.a", "S", b"2", message_id="b", last_sequence=0)


async def test_publishing_goes_on_after_the_server_was_killed(broker: Broker, nats_server: NatsServer) -> None:
    await broker.publish("s.a", b"1", message_id="1")
    nats_server.kill()
    publishing = asyncio.create_task(broker.publish("s.a", b"2", message_id="2", deadline_seconds=30))
    await asyncio.sleep(0.5)
    nats_server.start()
    assert (await asyncio.wait_for(publishing, 30)).sequence == 2
    assert (await broker.get("S", 1)).data == b"1"


async def test_a_server_that_stays_away_ends_a_publish_in_words(broker: Broker, nats_server: NatsServer) -> None:
    nats_server.kill()
    with pytest.raises(Unavailable, match=r"s\.a within 1 s"):
        await asyncio.wait_for(broker.publish("s.a", b"1", message_id="1", deadline_seconds=1.0), 15)
    nats_server.start()


async def test_a_missing_server_is_reported_within_the_time() -> None:
    with pytest.raises(Unavailable, match="did not answer within 1 s"):
        await asyncio.wait_for(connect("nats://127.0.0.1:1", "test", wait_seconds=1.0), 10)


async def test_a_lease_that_is_not_kept_goes_to_another(broker: Broker) -> None:
    await broker.publish("s.a", b"work", message_id="1")
    with pytest.raises(Unavailable, match="no consumer workers of stream S yet"):
        await PullConsumer.open(broker, "S", "workers")
    await ensure_consumer(broker, "S", "workers", lease_seconds=1.0)
    first, second = [await PullConsumer.open(broker, "S", "workers") for _ in range(2)]
    (taken,) = [message async for message in first.lease(1, 2.0)]
    kept = [message async for message in second.lease(1, 0.5)]
    assert kept == []
    (again,) = [message async for message in second.lease(1, 5.0)]
    assert (again.data, again.deliveries) == (taken.data, 2)
    assert await again.ack()


async def test_a_lease_that_is_kept_stays(broker: Broker) -> None:
    await broker.publish("s.a", b"work", message_id="1")
    await ensure_consumer(broker, "S", "workers", lease_seconds=1.0)
    consumer = await PullConsumer.open(broker, "S", "workers")
    (taken,) = [message async for message in consumer.lease(1, 2.0)]
    for _ in range(5):
        await asyncio.sleep(0.4)
        assert await taken.extend()
    assert [message async for message in consumer.lease(1, 0.3)] == []
    assert await taken.ack()


async def test_tail_sees_everything_in_order_through_a_restart(broker: Broker, nats_server: NatsServer) -> None:
    for index in range(5):
        await broker.publish("s.a", str(index).encode(), message_id=str(index))
    seen: list[int] = []

    async def read() -> None:
        async for message in tail(broker, "S", 0):
            seen.append(int(message.data))
            if len(seen) == 10:
                return

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.5)
    nats_server.kill()
    nats_server.start()
    for index in range(5, 10):
        await broker.publish("s.a", str(index).encode(), message_id=str(index))
    await asyncio.wait_for(reading, 30)
    assert seen == list(range(10))


async def test_tail_asks_again_for_what_was_lost_on_its_way(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the server of a cluster to which the reader was connected: the next message comes from another one."""
    next_one, lost = consume._Pull._next, []

    async def lossy(pull: consume._Pull, silence_seconds: float) -> Msg:
        raw = await next_one(pull, silence_seconds)
        if not lost and raw.subject.startswith("s.") and consume.Message.of(raw).sequence == 2:
            lost.append(raw)
            return await next_one(pull, silence_seconds)
        return raw

    monkeypatch.setattr(consume._Pull, "_next", lossy)
    for index in range(1, 5):
        await broker.publish("s.a", b"", message_id=str(index))
    seen: list[int] = []
    async with asyncio.timeout(60):
        async for message in tail(broker, "S", 0):
            seen.append(message.sequence)
            if len(seen) == 4:
                break
    assert (seen, len(lost)) == ([1, 2, 3, 4], 1)


async def test_a_hole_in_the_log_stops_the_reader_and_is_named(broker: Broker) -> None:
    for index in range(4):
        await broker.publish("s.a", b"x", message_id=str(index))
    await broker.delete("S", 3)
    with pytest.raises(Gap, match="sequences 3 to 3 are missing"):
        async with asyncio.timeout(20):
            async for _ in tail(broker, "S", 0):
                pass


async def test_a_message_that_is_too_large_is_refused_at_once(broker: Broker) -> None:
    with pytest.raises(InvalidInput, match=f"on s.a has {broker.most_bytes + 1} bytes, NATS takes {broker.most_bytes}"):
        async with asyncio.timeout(5):
            await broker.publish("s.a", bytes(broker.most_bytes + 1), message_id="1", deadline_seconds=60)


async def test_a_message_is_deleted_once(broker: Broker) -> None:
    for index in range(3):
        await broker.publish("s.a", b"x", message_id=str(index))
    for _ in range(2):
        await broker.delete("S", 2)
    assert (await broker.state("S")).messages == 2
    assert [(await broker.get("S", sequence)).sequence for sequence in (1, 3)] == [1, 3]
    with pytest.raises(NotFound):
        await broker.get("S", 2)
    await broker.delete("NONE", 1)  # as it is gone


async def test_buckets_change_by_compare_and_set(broker: Broker) -> None:
    bucket = await Bucket.open(broker, "b")
    revision = await bucket.put_if("k", b"1", 0)
    with pytest.raises(SequenceConflict):
        await bucket.put_if("k", b"2", 0)
    await bucket.put_if("k", b"2", revision)

    async def add_one() -> None:
        for _ in range(10):
            await bucket.update("n", lambda old: str(int(old or b"0") + 1).encode())

    await asyncio.gather(add_one(), add_one(), add_one())
    assert (await bucket.get("n")).value == b"30"


async def test_watch_sees_changes_through_a_restart(broker: Broker, nats_server: NatsServer) -> None:
    bucket = await Bucket.open(broker, "b")
    seen: list[bytes] = []

    async def watch() -> None:
        async for entry in bucket.watch("k"):
            seen.append(entry.value)
            if entry.value == b"2":
                return

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.3)
    await bucket.put_if("k", b"1", 0)
    await asyncio.sleep(0.3)
    nats_server.kill()
    nats_server.start()
    await bucket.update("k", lambda _: b"2")
    await asyncio.wait_for(watching, 30)
    assert seen == [b"", b"1", b"2"]


async def test_a_blob_comes_back_whole_or_not_at_all(broker: Broker) -> None:
    run = names.RunNames("run")
    await ensure_streams(broker, [StreamSpec(run.blobs_stream, (run.subjects("blobs"),))])
    data = bytes(range(256)) * 8000
    reference = await blobs.store(broker, run, "a", data)
    assert reference.chunks > 1
    assert await blobs.fetch(broker, run, "a", reference) == data
    await broker.publish(run.blob("a", reference.key, 1), b"damaged", message_id="damage")
    with pytest.raises(InvalidInput, match=reference.key):
        await blobs.fetch(broker, run, "a", reference)


async def test_what_is_not_permitted_is_an_error_in_words_and_no_time_out(tmp_path: Path) -> None:
    rules = """
authorization {
  users: [{
    user: "rollout"
    password: "secret"
    permissions: {publish: {deny: ["forbidden.>", "$JS.API.STREAM.CREATE.>", "$JS.API.STREAM.PURGE.>"]}}
  }, {user: "admin", password: "admin"}]
}
"""
    server = NatsServer(tmp_path, rules)
    server.start()
    try:
        address = server.url.removeprefix("nats://")
        async with await connect(f"nats://admin:admin@{address}", "admin") as admin:
            await ensure_streams(admin, [StreamSpec("F", ("forbidden.>",))])
        async with await connect(f"nats://rollout:secret@{address}", "rollout", request_seconds=1.0) as rollout:
            begin = time.monotonic()
            with pytest.raises(PermissionDenied, match=r"forbidden\.a"):
                await rollout.publish("forbidden.a", b"1", message_id="1")
            with pytest.raises(PermissionDenied, match=r"(?i)stream\.create"):
                await ensure_streams(rollout, [StreamSpec("NEW", ("new.>",))])
            for _ in range(2):
                with pytest.raises(PermissionDenied, match=r"(?i)purge"):
                    await rollout.purge_below("F", 1)
            assert time.monotonic() - begin < 10
            assert (await rollout.state("F")).messages == 0, "what is permitted works"
    finally:
        server.kill()


async def test_a_cancellation_that_the_client_forgets_still_ends_the_task(broker: Broker) -> None:
    """nats-py answers a request whose message comes at the moment of the cancellation as if there was none."""

    async def forgetful() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(30)
        return "the answer"

    asking = asyncio.create_task(broker.request(forgetful, "a question"))
    await asyncio.sleep(0.05)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asking, 10)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("blob.chunks", {"chunks": 2**31 - 1}), ("blob.chunks", {"chunks": 0}), ("blob.key", {"key": "> *"}),
        ("blob.size_bytes", {"size_bytes": 2**40}), ("blob.size_bytes", {"size_bytes": 0, "chunks": 0}),
        ("blob", {"crc32": 1}),
    ],
)  # fmt: skip
async def test_a_blob_that_contradicts_its_reference_is_refused(
    broker: Broker, field: str, changes: dict[str, Any]
) -> None:
    run = names.RunNames("blobs")
    await ensure_streams(broker, [StreamSpec(run.blobs_stream, (run.subjects("blobs"),))])
    reference = replace(await blobs.store(broker, run, "a", b"a payload"), **changes)
    with pytest.raises(InvalidInput) as refused:
        await blobs.fetch(broker, run, "a", reference)
    assert refused.value.field == field


async def test_a_server_of_several_is_enough(nats_url: str) -> None:
    async with await connect(f"nats://127.0.0.1:{free_port()},{nats_url}", "test", wait_seconds=20) as broker:
        await ensure_streams(broker, [StreamSpec("S", ("s.>",))])
        assert (await broker.publish("s.a", b"stored", message_id="1")).sequence == 1


async def test_a_url_spells_any_password_by_percent_signs(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, 'authorization {user: "a@b", password: "p@s:w/r,d 1%"}\n')
    server.start()
    try:
        url = server.url.replace("//", "//a%40b:p%40s%3Aw%2Fr%2Cd%201%25@")
        async with await connect(url, "test", wait_seconds=5):
            pass
        with pytest.raises(InvalidInput, match=r"must be nats://host:port .* of a password as %2C %2F"):
            await connect(server.url.replace("//", "//a:p/w@"), "test")
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("config", "user", "problem"),
    [
        ("jetstream: disabled\n", "", "nats_url: nats://127.* has no JetStream; start that nats-server with -js"),
        ("accounts {\n A: {users: [{user: a, password: b}]}\n}\n", "a:b@", "no JetStream for the account of a; enable"),
    ],
)
async def test_a_server_or_an_account_without_jetstream_is_named_at_once(
    tmp_path: Path, config: str, user: str, problem: str
) -> None:
    server = NatsServer(tmp_path, config)
    server.start()
    try:
        with pytest.raises((InvalidInput, PermissionDenied), match=problem):
            await connect(server.url.replace("//", f"//{user}"), "test", wait_seconds=20)
    finally:
        server.stop()
