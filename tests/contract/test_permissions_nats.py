"""Publishing and subscribing on NATS by role: a real server decides as trust/subjects.py."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest
import structlog

from support.servers.nats import NatsServer
from trinity.runtime import names
from trinity.runtime.broker import Bucket, StreamSpec, connect, ensure_consumer, ensure_streams, tail
from trinity.runtime.errors import InvalidInput, PermissionDenied, Unauthenticated
from trinity.runtime.names import RunNames, owner_of
from trinity.runtime.trust import nats_users
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.subjects import ALL_RUNS, Grants, grants, inbox, matches

pytestmark = pytest.mark.core

RUN, OTHER_RUN = RunNames("a-run"), RunNames("b-run")
ROLES = tuple(role for role in Role if role is not Role.PROVIDER)
EXPLORER, OTHER = owner_of("one"), owner_of("two")
_SECONDS = 30.0
_NOT_ALLOWED = "the.last.of.all"
_READ_ANNOUNCEMENT = f"$JS.API.DIRECT.GET.KV_{names.ANNOUNCEMENTS_BUCKET}.$KV.{names.ANNOUNCEMENTS_BUCKET}"


def run_of(role: Role) -> str:
    return ALL_RUNS if role is Role.SYNC else RUN.run


def granted(role: Role) -> Grants:
    return grants(role, run_of(role), "one")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    folder = tmp_path_factory.mktemp("server")
    server = NatsServer(folder, users=folder / "identity")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def users(server: NatsServer) -> Path:
    assert server.users is not None
    return server.users


@pytest.fixture
def url(server: NatsServer) -> str:
    return server.url


def creds(users: Path, role: Role, name: str = "one") -> Path:
    return nats_users.user_file(users, role, name, run_of(role))


def concrete(pattern: str) -> str:
    """Returns a subject that the pattern matches."""
    return pattern.replace("*", "x").replace(">", "x.y")


def probes() -> list[str]:
    """Returns a subject for every right of every role, its twins of another run and explorer, and roleless subjects."""
    patterns = {p for role in ROLES for p in (*granted(role).publish, *granted(role).subscribe)}
    patterns |= {p.replace(RUN.run, OTHER_RUN.run) for p in patterns}
    patterns |= {p.replace(EXPLORER, OTHER) for p in patterns}
    verbs = ("STREAM.DELETE", "STREAM.PURGE", "STREAM.CREATE", "STREAM.UPDATE", "STREAM.MSG.GET", "STREAM.MSG.DELETE",
             "STREAM.SNAPSHOT", "STREAM.RESTORE", "DIRECT.GET", "CONSUMER.CREATE", "CONSUMER.LIST")  # fmt: skip
    kinds = (RUN.experiences_stream, RUN.tasks_stream, RUN.weights_stream, f"KV_{names.VERSIONS_BUCKET}")
    not_allowed = {f"$JS.API.{verb}.{stream}" for verb in verbs for stream in kinds}
    not_allowed |= {f"$JS.API.CONSUMER.DURABLE.CREATE.{RUN.experiences_stream}.explorers", "$JS.API.STREAM.LIST",
                    f"$JS.API.CONSUMER.DELETE.{RUN.tasks_stream}.explorers", "$JS.API.STREAM.NAMES",
                    f"$KV.{names.RUNS_BUCKET}.{RUN.run}.other", "$SYS.REQ.SERVER.PING", "trinity.anything",
                    "anything"}  # fmt: skip
    return sorted({concrete(pattern) for pattern in patterns | not_allowed})


async def refused_by_server(url: str, path: Path, subjects: list[str], *, subscribe: bool) -> set[str]:
    """Returns the subjects that the server refuses to this user. The last subject, of no role, ends the wait."""
    refused: set[str] = set()
    answered = asyncio.Event()

    async def note(error: Exception) -> None:
        refused.update(subject for subject in subjects if f'"{subject.lower()}"' in str(error).lower())
        if f'"{_NOT_ALLOWED}"' in str(error):
            answered.set()

    client = await nats.connect(url, user_credentials=str(path), error_cb=note, allow_reconnect=False)
    try:
        for subject in [*subjects, _NOT_ALLOWED]:
            if subscribe:
                await client.subscribe(subject)
            else:
                await client.publish(subject, b"")
        await asyncio.wait_for(answered.wait(), _SECONDS)
    finally:
        await client.close()
    return refused


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("way", ["publish", "subscribe"])
async def test_every_subject_is_allowed_or_denied_as_the_table_says(
    role: Role, way: str, url: str, users: Path
) -> None:
    allowed = granted(role).subscribe if way == "subscribe" else granted(role).publish
    subjects = probes()
    expected = {subject for subject in subjects if not any(matches(pattern, subject) for pattern in allowed)}
    assert 10 < len(expected) < len(subjects)
    assert await refused_by_server(url, creds(users, role), subjects, subscribe=way == "subscribe") == expected


# Written by hand to find a wrong line in the table: subject -> roles that may publish on it.
PUBLISH = {
    RUN.experience(EXPLORER, 3, "sums"): {Role.EXPLORER, Role.BUFFER},  # the buffer: groups of a fork's parent
    RUN.experience(EXPLORER, 3, "sums", blob=True): {Role.EXPLORER, Role.BUFFER},
    RUN.failure(EXPLORER, "sums"): {Role.EXPLORER},
    RUN.evaluation(EXPLORER, "sums"): {Role.EXPLORER},
    RUN.blob(EXPLORER, "0" * 32, 1): {Role.EXPLORER, Role.BUFFER},
    RUN.experience(OTHER, 3, "sums"): {Role.BUFFER},
    RUN.failure(OTHER, "sums"): set(),
    RUN.evaluation(OTHER, "sums"): set(),
    RUN.blob(OTHER, "0" * 32, 1): {Role.BUFFER},
    OTHER_RUN.experience(EXPLORER, 3, "sums"): set(),
    RUN.control: {Role.BUFFER},
    RUN.task("sums", 1): {Role.BUFFER},
    RUN.evaluation_task("sums"): {Role.BUFFER},
    RUN.batch(1): {Role.BUFFER},
    RUN.skip(1): {Role.BUFFER, Role.OPERATOR},
    RUN.cursor: {Role.BUFFER},
    RUN.dead_letter(1): {Role.BUFFER},
    RUN.weights_part("v1", "f", 0): {Role.TRAINER},
    RUN.line("buffer", OTHER): {Role.BUFFER},
    RUN.line("environment", OTHER): {Role.ENVIRONMENT},
    RUN.line("explorer", EXPLORER): {Role.EXPLORER},
    RUN.line("explorer", OTHER): set(),
    RUN.line("sync", OTHER): {Role.SYNC},
    RUN.line("tinker", OTHER): {Role.TINKER},
    RUN.command("a-model"): {Role.TINKER},
    RUN.result("a-model"): {Role.TINKER},
    OTHER_RUN.command("a-model"): set(),
    RUN.line("trainer", OTHER): {Role.TRAINER},
    OTHER_RUN.line("explorer", EXPLORER): set(),
    OTHER_RUN.line("sync", OTHER): {Role.SYNC},
    f"$KV.{names.VERSIONS_BUCKET}.{RUN.live_key}": {Role.SYNC},
    f"$KV.{names.VERSIONS_BUCKET}.{RUN.claim_key}": {Role.SYNC},
    f"$KV.{names.MANIFESTS_BUCKET}.{RUN.manifest_key(1, 'd')}": {Role.SYNC},
    f"$KV.{names.MEMBERS_BUCKET}.{RUN.member_key('one')}": {Role.SYNC},
    f"$KV.{names.RUNS_BUCKET}.{RUN.commit_key}": {Role.BUFFER},
    f"$KV.{names.RUNS_BUCKET}.{RUN.job_key}": {Role.OPERATOR},
    f"$KV.{names.ANNOUNCEMENTS_BUCKET}.{RUN.announcement_key}": {Role.BUFFER},
    f"$KV.{names.ANNOUNCEMENTS_BUCKET}.{OTHER_RUN.announcement_key}": set(),
    f"$JS.API.STREAM.CREATE.KV_{names.ANNOUNCEMENTS_BUCKET}": {Role.BUFFER},
    f"{_READ_ANNOUNCEMENT}.{RUN.announcement_key}": {
        Role.EXPLORER,
        Role.TRAINER,
        Role.OPERATOR,
        Role.READER,
    },
    f"{_READ_ANNOUNCEMENT}.{OTHER_RUN.announcement_key}": {Role.OPERATOR, Role.READER},
    f"$JS.API.DIRECT.GET.{RUN.experiences_stream}": {Role.BUFFER, Role.OPERATOR, Role.READER},
    f"$JS.API.DIRECT.GET.{RUN.blobs_stream}.{RUN.blob(OTHER, 'k', 0)}": {Role.BUFFER, Role.OPERATOR, Role.READER},
    f"$JS.API.DIRECT.GET.{RUN.tasks_stream}": {Role.BUFFER, Role.EXPLORER, Role.OPERATOR, Role.READER},
    f"$JS.API.CONSUMER.CREATE.{RUN.experiences_stream}": {Role.BUFFER},
    f"$JS.API.CONSUMER.MSG.NEXT.{RUN.tasks_stream}.explorers": {Role.EXPLORER},
    f"$JS.API.CONSUMER.DURABLE.CREATE.{RUN.tasks_stream}.explorers": {Role.BUFFER},
    f"$JS.ACK.{RUN.tasks_stream}.explorers.1.2.3.4.5": {Role.BUFFER, Role.EXPLORER},
    f"$JS.API.DIRECT.GET.{RUN.lines_stream}": {Role.BUFFER, Role.OPERATOR, Role.READER},
    f"$JS.API.STREAM.PURGE.{RUN.lines_stream}": set(),
    f"$JS.API.STREAM.CREATE.{RUN.tasks_stream}": {Role.BUFFER},
    f"$JS.API.STREAM.PURGE.{RUN.experiences_stream}": {Role.BUFFER},
    f"$JS.API.STREAM.PURGE.{RUN.weights_stream}": {Role.TRAINER},
    f"$JS.API.STREAM.CREATE.{RUN.weights_stream}": {Role.BUFFER},
    f"$JS.API.STREAM.UPDATE.{RUN.weights_stream}": {Role.BUFFER},
    f"$JS.API.STREAM.DELETE.{RUN.experiences_stream}": set(),
    f"$JS.API.STREAM.DELETE.KV_{names.VERSIONS_BUCKET}": set(),
    f"$JS.API.STREAM.PURGE.KV_{names.VERSIONS_BUCKET}": set(),
    f"$JS.API.STREAM.PURGE.{RUN.batches_stream}": set(),
    f"$JS.API.STREAM.MSG.DELETE.{RUN.experiences_stream}": set(),
}
SUBSCRIBE = {
    ">": set(),
    "_INBOX.>": set(),
    f"trinity.{RUN.run}.>": set(),
    RUN.experience(EXPLORER, 3, "sums"): set(),
    f"$KV.{names.VERSIONS_BUCKET}.{RUN.live_key}": {Role.BUFFER, Role.SYNC},
    f"$KV.{names.MEMBERS_BUCKET}.{RUN.member_key('one')}": {Role.SYNC},
    f"{inbox(Role.EXPLORER, 'one')}.x": {Role.EXPLORER},
    f"{inbox(Role.EXPLORER, 'two')}.x": set(),
    f"{inbox(Role.BUFFER, 'one')}.x": {Role.BUFFER},
}


@pytest.mark.parametrize("role", ROLES)
async def test_the_table_is_what_the_roles_are_for(role: Role, url: str, users: Path) -> None:
    path = creds(users, role)
    for table, subscribe in ((PUBLISH, False), (SUBSCRIBE, True)):
        refused = await refused_by_server(url, path, list(table), subscribe=subscribe)
        assert refused == {subject for subject, roles in table.items() if role not in roles}


async def test_a_refusal_names_user_and_subject_at_once(server: NatsServer, url: str, users: Path) -> None:
    """A refusal does not wait for the time limit of the request, which is longer than the test's."""
    async with await connect(server.url, "admin", creds=server.admin()) as broker:
        await ensure_streams(broker, [StreamSpec(RUN.tasks_stream, (RUN.subjects("tasks"),))])
        await ensure_streams(broker, [StreamSpec(RUN.experiences_stream, RUN.log_subjects)])
        await ensure_consumer(broker, RUN.tasks_stream, names.TASKS_CONSUMER, lease_seconds=5)
        bucket = await Bucket.open(broker, names.VERSIONS_BUCKET)
        await bucket.put_if(RUN.live_key, b"1", 0)
    path = creds(users, Role.EXPLORER)
    async with (
        asyncio.timeout(_SECONDS),
        await connect(url, "explorer", creds=path, request_seconds=10 * _SECONDS) as broker,
    ):
        with pytest.raises(PermissionDenied, match=rf"forbids explorer/one \(.*\) to publish on .*{OTHER}"):
            await broker.publish(RUN.experience(OTHER, 0, "sums"), b"forged", message_id="1")
        with pytest.raises(PermissionDenied, match=r"direct\.get"):
            await broker.get(RUN.experiences_stream, 1)
        with pytest.raises(PermissionDenied, match=r"direct\.get"):
            await broker.several(RUN.experiences_stream, 1, 10)
        with pytest.raises(PermissionDenied, match=r"consumer\.create"):
            await anext(tail(broker, RUN.experiences_stream, 0))
        with pytest.raises(PermissionDenied, match=r"stream\.purge"):
            await broker.purge_below(RUN.experiences_stream, 9)
        with pytest.raises(PermissionDenied, match=r"stream\.info"):
            await ensure_streams(broker, [StreamSpec("MINE", ("mine.>",))])
        with pytest.raises(PermissionDenied, match=r"stream\.info"):
            await Bucket.open(broker, names.VERSIONS_BUCKET)
        own = await broker.publish(RUN.experience(EXPLORER, 0, "sums"), b"own", message_id="2")
        assert own.sequence == 1
    reader = await connect(url, "reader", creds=creds(users, Role.READER))
    async with reader as broker:
        assert (await broker.get(RUN.experiences_stream, 1)).data == b"own"


async def test_a_user_that_the_server_does_not_know_is_refused(url: str, users: Path, tmp_path: Path) -> None:
    expired, foreign = tmp_path / "expired.creds", tmp_path / "foreign"
    expired.write_text(nats_users.issue_user(users, Role.READER, "old", RUN.run, days=-1))
    nats_users.init_accounts(foreign)
    other = nats_users.user_file(foreign, Role.READER, "stranger", RUN.run)
    for path, named in (
        (None, "a client without credentials"),
        (expired, "reader/old .* expired"),
        (other, "reader/stranger"),
    ):
        with pytest.raises(Unauthenticated, match=f"refuses {named}"):
            await connect(url, "test", creds=path, wait_seconds=10 * _SECONDS)


async def test_credentials_that_expire_are_replaced_without_a_restart(url: str, users: Path, tmp_path: Path) -> None:
    path = tmp_path / "reader.creds"
    path.write_text(nats_users.issue_user(users, Role.READER, "short", RUN.run, days=2 / 86_400))
    with structlog.testing.capture_logs() as events:
        async with asyncio.timeout(_SECONDS), await connect(url, "test", creds=path) as broker:
            while not any(event["event"] == "nats.client.refused" for event in events):
                await asyncio.sleep(0.05)
            path.write_text(nats_users.issue_user(users, Role.READER, "short", RUN.run))
            await broker.request(broker.js.account_info, "account")


def test_files_are_the_owners_alone_and_say_what_is_wrong_with_them(users: Path, tmp_path: Path) -> None:
    path = creds(users, Role.EXPLORER)
    secret = [*users.glob("*.seed"), path]
    assert [file.stat().st_mode & 0o777 for file in secret] == [0o600] * 4
    for_server = (users / nats_users.ACCOUNTS_FILE).read_text()
    assert not [file for file in secret if file.read_text().split()[-1] in for_server]
    user = nats_users.read_user(path)
    assert (user.name, user.inbox, user.expires) == ("explorer/one", inbox(Role.EXPLORER, "one"), 0)
    kept = (users / "account.seed").read_bytes()
    nats_users.init_accounts(users)
    assert (users / "account.seed").read_bytes() == kept
    (tmp_path / "x.creds").write_text("secret-of-the-run")
    for bad in (tmp_path / "x.creds", tmp_path / "none.creds", tmp_path):
        with pytest.raises(InvalidInput, match="nats_creds") as wrong:
            nats_users.read_user(bad)
        assert "secret-of-the-run" not in str(wrong.value)
    for role, run in ((Role.PROVIDER, "a"), (Role.EXPLORER, ALL_RUNS), (Role.BUFFER, "")):
        with pytest.raises(InvalidInput):
            nats_users.issue_user(users, role, "x", run)
