"""Credentials of a run, used against it on a real nats-server: neither replies nor ids reach others' messages."""

import asyncio
import hashlib
import itertools
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from nats.js.api import Header

from support.fakes.data.experience import make_group, make_task
from support.fakes.peers import a_failure
from support.servers.nats import NatsServer
from trinity.data.experience import UNLIMITED
from trinity.data.wire import encode_outcome
from trinity.explorer.journal.journal import Journals
from trinity.explorer.rollout import attempt
from trinity.runtime import names
from trinity.runtime.broker import Broker, Bucket, StreamSpec, blobs, connect, ensure_consumer, ensure_streams, tail
from trinity.runtime.names import RunNames, owner_of
from trinity.runtime.trust import nats_users
from trinity.runtime.trust.roles import Role

pytestmark = pytest.mark.core

sys.path.insert(0, str(Path(__file__).parent))

import forgeries  # noqa: E402
import replies  # noqa: E402

RUN = RunNames("a-run")
_KINDS = ("tasks", "evaluation_tasks", "evaluations", "batches", "cursors", "deadletters", "blobs", "turns", "lines",
          "weights")  # fmt: skip
_BUCKETS = (names.VERSIONS_BUCKET, names.MANIFESTS_BUCKET, names.MEMBERS_BUCKET, names.RUNS_BUCKET,
            names.ANNOUNCEMENTS_BUCKET)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    folder = tmp_path_factory.mktemp("server")
    server = NatsServer(folder, users=folder / "identity")
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def admin(server: NatsServer) -> AsyncIterator[Broker]:
    async with await connect(server.url, "admin", creds=server.admin()) as broker:
        await fill(broker)
        yield broker


async def fill(broker: Broker) -> None:
    """Makes every stream and bucket of a run, and tasks in the queue."""
    streams = [StreamSpec(f"TRINITY_{kind.upper()}_{RUN.run}", (RUN.subjects(kind),)) for kind in _KINDS]
    await ensure_streams(broker, [*streams, StreamSpec(RUN.experiences_stream, RUN.log_subjects)])
    for bucket in _BUCKETS:
        await Bucket.open(broker, bucket, purges=bucket not in (names.RUNS_BUCKET, names.ANNOUNCEMENTS_BUCKET))
    for queue in (RUN.tasks_stream, RUN.evaluation_tasks_stream):
        await ensure_consumer(broker, queue, names.TASKS_CONSUMER, lease_seconds=5)
    for ordinal in range(1, 41):
        await broker.publish(RUN.task("sums", ordinal), b"a task", message_id=f"{time.time()}")


async def counts(broker: Broker) -> dict[str, int]:
    """How many messages each subject has, of all streams."""
    found: dict[str, int] = {}
    for stream in [one.config.name for one in await broker.js.streams_info()]:
        info = await broker.js.stream_info(str(stream), subjects_filter=">")
        found |= info.state.subjects or {}
    return found


@pytest.mark.parametrize("role", replies.ROLES)
async def test_no_answer_is_stored_under_anothers_subject(
    role: Role, server: NatsServer, admin: Broker, tmp_path: Path
) -> None:
    assert server.users is not None
    creds = replies.credentials(server.users, role, RUN, tmp_path)
    before = await counts(admin)
    targets = await replies.forge(server.url, creds, role, RUN)
    after = await counts(admin)
    assert len(targets) > 15
    assert {what: after[one] for what, one in targets.items() if after.get(one, 0) > before.get(one, 0)} == {}
    own = [one for one in after if after[one] > before.get(one, 0)]
    assert own or role is Role.READER, "what the role itself may publish was not stored"


@pytest.mark.parametrize(
    ("role", "bucket", "key"),
    [
        (Role.OPERATOR, names.RUNS_BUCKET, RUN.job_key),
        (Role.BUFFER, names.RUNS_BUCKET, RUN.commit_key),
        (Role.BUFFER, names.ANNOUNCEMENTS_BUCKET, RUN.announcement_key),
    ],
)
async def test_a_roll_up_of_a_key_removes_no_key_of_other_runs(
    role: Role, bucket: str, key: str, server: NatsServer, admin: Broker, tmp_path: Path
) -> None:
    assert server.users is not None
    other = await Bucket.open(admin, bucket, purges=False)
    await other.put("another.run", b"its record")
    creds = replies.credentials(server.users, role, RUN, tmp_path)
    async with await connect(server.url, "mallory", creds=creds) as broker:
        await broker.client.publish(f"$KV.{bucket}.{key}", b"{}", headers={"Nats-Rollup": "all"})
        await broker.client.flush()
    assert (await other.get("another.run")).value == b"its record"


async def shapes(broker: Broker) -> dict[str, object]:
    """Settings of each stream and its consumers, and how many messages were stored and removed."""
    found: dict[str, object] = {}
    for info in await broker.js.streams_info():
        name = str(info.config.name)
        consumers = [(one.name, one.config, one.paused) for one in await broker.js.consumers_info(name)]
        found[name] = info.config, info.state.first_seq, info.state.last_seq, info.state.messages, consumers
    return found


@pytest.mark.parametrize("role", replies.ROLES)
async def test_no_role_changes_streams_or_consumers(
    role: Role, server: NatsServer, admin: Broker, tmp_path: Path
) -> None:
    assert server.users is not None
    before = await shapes(admin)
    assert await replies.misuse(server.url, replies.credentials(server.users, role, RUN, tmp_path), role, RUN) > 100
    assert await shapes(admin) == before


async def test_the_requests_of_that_test_change_something(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, users=tmp_path / "identity")
    server.start()
    try:
        async with await connect(server.url, "admin", creds=server.admin()) as broker:
            await fill(broker)
            before = await shapes(broker)
            await replies.misuse(server.url, server.admin(), Role.BUFFER, RUN)
            assert await shapes(broker) != before
    finally:
        server.kill()


@pytest.mark.parametrize("body", [b"", b"a payload"])
async def test_no_header_hides_a_message_from_its_readers(body: bytes, server: NatsServer, admin: Broker) -> None:
    """Headers that NATS itself uses in answers: a reader that took one for an answer would miss the message."""
    assert server.users is not None
    creds = nats_users.user_file(server.users, Role.EXPLORER, "mallory", RUN.run)
    subject = RUN.experience(owner_of("mallory"), 0, "sums")
    stream, before = RUN.experiences_stream, (await admin.state(RUN.experiences_stream)).last_sequence
    async with await connect(server.url, "mallory", creds=creds) as forger:
        await forgeries.with_headers(forger, subject, body)
        await forger.publish(subject, b"the last", message_id=f"{time.time()}")
    wanted = [(before + 1 + number, body) for number in range(len(forgeries.HEADERS))]
    read: list[tuple[int, bytes]] = []
    async with asyncio.timeout(20):
        async for message in tail(admin, stream, before):
            if message.data == b"the last":
                break
            read.append((message.sequence, message.data))
    assert read == wanted
    assert [(one.sequence, one.data) for one in await admin.several(stream, before + 1, len(wanted))] == wanted
    for sequence, _ in wanted:
        one = await admin.get(stream, sequence)
        assert (one.sequence, one.subject, one.data) == (sequence, subject, body)


async def test_no_message_id_drops_anothers_message(server: NatsServer, admin: Broker) -> None:
    """The forger guesses ids, and knows all that were ever stored."""
    assert server.users is not None
    creds = [nats_users.user_file(server.users, Role.EXPLORER, name, RUN.run) for name in ("mallory", "victim")]
    task, mine, theirs = make_task(1), owner_of("mallory"), owner_of("victim")
    group, failure = (replace(one, explorer_id="victim") for one in (make_group(task), a_failure(task, 1)))
    data, turn = b"a payload" * 9, RUN.turn(1, 1, theirs)
    guessed = [task.task_id, f"{task.task_id}/failed/1", turn, f"{turn}/1", f"{turn}/returned"]
    guessed += [f"{theirs}/{hashlib.sha256(data).hexdigest()[:32]}/0"]
    own = [RUN.experience(mine, 0, "x"), RUN.evaluation(mine, "x"), RUN.blob(mine, "x", 0), RUN.turn(1, 1, mine)]
    async with (
        await connect(server.url, "a", creds=creds[0]) as forger,
        await connect(server.url, "b", creds=creds[1]) as victim,
    ):
        journals = Journals(victim, RUN, "victim", UNLIMITED, bool, lambda _: asyncio.sleep(0, True))
        for _ in range(2):
            for subject, name in itertools.product(own, guessed):
                await forger.publish(subject, b"", message_id=name)
            for outcome in (group, failure):
                receipt = await attempt.store(victim, RUN, outcome)
                stored = await admin.get(RUN.experiences_stream, receipt.sequence)
                assert (receipt.duplicate, stored.data) == (False, encode_outcome(outcome))
            reference = await blobs.store(victim, RUN, theirs, data)
            assert await blobs.fetch(admin, RUN, theirs, reference) == data
            await journals.give_back(task, 1)
            guessed += [(await admin.last(RUN.turns_stream, turn)).headers[Header.MSG_ID.value]]
            guessed += [stored.headers[Header.MSG_ID.value]]
            guessed += [(await admin.last(RUN.blobs_stream, RUN.blob(theirs, reference.key, 0))).headers["Nats-Msg-Id"]]
