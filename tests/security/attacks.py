"""Attacks that once ended a run, on a live one: no process restarts, and the run continues.

    python tests/security/attacks.py --job checkpoints/quickstart/arithmetic

The attacker may publish and read everything in the run's NATS, more than any process of the run itself.
Groups that cannot be decoded or are far too large, references to blobs that cannot be, foreign bytes on the subjects
and in the live version's key, forged rewards, and tasks that make the environment service import a module, open a path
or fetch any address. Calls that change a run: without an identity, as an explorer, and as a reader.
With real credentials of every role: requests whose answers NATS sends to others' subjects, and ids of others' messages.
A forged record of the run, which an explorer on another machine would join. Prints one table; exit code 1 if a process
restarted, a step did not come, or something was not refused.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import forgeries
import grpc.aio
import replies
from google.protobuf.message import DecodeError
from rich.console import Console
from rich.table import Table

from support.fakes.data.experience import make_group
from support.fakes.peers import FakeTrainer
from trinity.api.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from trinity.api.common.v1 import experience_pb2, task_pb2
from trinity.api.environment.v1 import environment_pb2, environment_pb2_grpc
from trinity.buffer.log.wire import TaskMessage
from trinity.config import load
from trinity.config.run_record import Addresses, RunRecord
from trinity.data.wire import encode_reference, fill_group, task_from_proto
from trinity.reading import run_record
from trinity.reading.job import read_records
from trinity.runtime import headers, names, rpc
from trinity.runtime.broker import Broker, Bucket, Message, PullConsumer, blobs, connect, on_subject
from trinity.runtime.errors import PermissionDenied
from trinity.runtime.messages import to_message
from trinity.runtime.trust import nats_users
from trinity.runtime.trust.identity import Identity
from trinity.runtime.trust.roles import Role

_STEP_SECONDS, _TASK_SECONDS = 180.0, 180.0
_CALL_SECONDS = 20.0
_EPISODE_SECONDS = 120.0  # a worker process imports the environment's library first
_COUNTED_SECONDS, _TRIES = 5.0, 10
_GUESSED = 20  # of the newest tasks, which are outstanding
_SERVICES = ("buffer", "sync")
_REFUSALS = ("INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "FAILED_PRECONDITION", "refused")
_IMPORTS, _CALLS, _OPENS = "would be imported into the", "an address that the", "may be a path, a URL or a module"
OWNER = names.owner_of("tester")


@dataclass
class Row:
    """What became of one attack."""

    attack: str
    outcome: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Counted:
    """An entry that the buffer has to refuse: its counter grows by as much."""

    counter: str
    entries: int = 1


class Target:
    """A live run, as an outsider reaches it."""

    def __init__(self, job: Path, broker: Broker, creds: Path | None) -> None:
        self._job = job
        self._creds = creds
        self.identities = job / "identity"
        self.broker = broker
        self.record = read_records(job)["main"]
        self.names = names.RunNames(self.record.run)
        self._mark = 0
        self._leased: Message | None = None

    def address(self, service: str) -> str:
        return next(one.address for one in self.processes() if one.service == service)

    def processes(self) -> list[Any]:
        found = read_records(self._job).get("main")
        return found.processes if found else []

    def restarts(self) -> dict[str, int]:
        return {one.name: one.restarts for one in self.processes()}

    async def stats(self) -> Any:
        async with rpc.channel(self.address("buffer"), identity=Identity(Role.READER, self.identities)) as channel:
            stub = buffer_pb2_grpc.BufferServiceStub(channel)
            return await stub.Stats(buffer_pb2.StatsRequest(run=self.record.run), timeout=_CALL_SECONDS)

    async def send(
        self, subject: str, data: bytes, header: dict[str, str] | None = None, broker: Broker | None = None
    ) -> None:
        self._mark += 1
        message_id = f"attack/{time.time()}/{self._mark}"
        await (broker or self.broker).publish(subject, data, message_id=message_id, headers=header or {})

    async def task(self) -> task_pb2.Task:
        """One that no explorer can answer: its lease is kept here until `let_go`. Tasks of the attacks are none."""
        await self.let_go()
        consumer = await PullConsumer.open(self.broker, self.names.tasks_stream, names.TASKS_CONSUMER)
        try:
            async with asyncio.timeout(_TASK_SECONDS):
                while True:
                    async for message in consumer.lease(1, _CALL_SECONDS):
                        self._leased = message
                    with contextlib.suppress(DecodeError):
                        task = task_pb2.Task.FromString(self._leased.data if self._leased else b"")
                        if task.task_id:
                            return task
                    await self.let_go()
        finally:
            await consumer.close()

    async def let_go(self) -> None:
        """The lease ends: an explorer takes the task."""
        if self._leased is not None:
            await self._leased.retry()
        self._leased = None

    async def group(
        self, change: Callable[[experience_pb2.Group], None], broker: Broker | None = None, owner: str = OWNER
    ) -> Counted:
        """A group of an outstanding task, changed, below the subject of an explorer, which takes it from the queue."""
        task = await self.task()
        outcome = experience_pb2.Outcome()
        fill_group(outcome.group, make_group(task_from_proto(task), version=task.gate_step))
        change(outcome.group)
        header = {headers.ORDINAL: str(task.ordinal)}
        await self.send(
            self.names.experience(owner, task.gate_step, task.taskset), outcome.SerializeToString(), header, broker
        )
        if self._leased is not None:
            await self._leased.ack()
            self._leased = None
        return Counted("dead_letters")

    async def forged_reward(self) -> None:
        """By who may publish as the explorer of the task: it is experience like any other."""
        await self.group(forgeries.each(reward=1e6))

    async def below_another_explorer(self) -> str:
        """How NATS answers a group that one explorer publishes as another; empty if it takes it."""
        with tempfile.TemporaryDirectory() as folder:
            own = Path(folder) / "explorer.creds"
            accounts = Path(self.record.nats_users)
            own.write_text(nats_users.issue_user(accounts, Role.EXPLORER, "mallory", self.record.run))
            async with await connect(self.record.nats_url, "mallory", creds=own) as broker:
                try:
                    await self.group(forgeries.each(reward=1e6), broker)
                except PermissionDenied as error:
                    return f"refused: {error}"
        return ""

    async def by_replies(self, role: Role) -> str:
        """What a role's credentials wrote under others' subjects, by the replies of what they may ask."""
        with tempfile.TemporaryDirectory() as folder:
            creds = replies.credentials(Path(self.record.nats_users), role, self.names, Path(folder))
            asked = await replies.forge(self.record.nats_url, creds, role, self.names, takes_tasks=False)
        found = await replies.forged(self.broker, self.names)
        return "; ".join(found) or f"refused: {len(asked)} subjects stay as they were"

    async def by_ids(self) -> Counted:
        """Empty messages with every id that an explorer can guess of another's results for the outstanding tasks."""
        fed = on_subject(self.broker, self.names.tasks_stream, self.names.subjects("tasks"))
        fed_tasks = [TaskMessage.parse(message.data) async for message in fed]
        newest = list(dict.fromkeys(task.fields.task_id for task in fed_tasks if task and task.fields.task_id))[
            -_GUESSED:
        ]
        guessed = [f"{task}{rest}" for task in newest for rest in ("", "/failed/1", "/requeue/1")]
        guessed += [f"fence/{rest}{version}" for version in range(20) for rest in ("", "rollback/")]
        subject = self.names.experience(names.owner_of(replies.NAME), 0, "sums")
        with tempfile.TemporaryDirectory() as folder:
            creds = replies.credentials(Path(self.record.nats_users), Role.EXPLORER, self.names, Path(folder))
            async with await connect(self.record.nats_url, "mallory", creds=creds) as broker:
                for guess in guessed:
                    await broker.publish(subject, b"", message_id=guess)
        return Counted("refused", len(guessed))

    async def calls(self, role: Role | None, code: grpc.StatusCode, services: tuple[str, ...]) -> str:
        """What every call that changes a run is answered, by its code; empty if one is not answered with `code`."""
        shown = Identity(role, self.identities) if role is not None else None
        for service in services:
            async with rpc.channel(self.address(service), identity=shown) as channel:
                for method, request in forgeries.calls_that_change(self.record.run, service):
                    call = channel.unary_unary(
                        f"/trinity.api.{service}.v1.{service.title()}Service/{method}",
                        request_serializer=lambda request: request.SerializeToString(),
                        response_deserializer=lambda data: data,
                    )
                    try:
                        await call(request, timeout=_CALL_SECONDS)
                        return ""
                    except grpc.aio.AioRpcError as error:
                        if error.code() is not code:
                            return ""
        return f"{code.name}: {', '.join(services)}"

    async def forged_record(self, refused: str, buffer: str = "", **model: Any) -> str:
        """What an explorer with a YAML of its own says of a record with an address or a model of the attacker's."""
        theirs = load(next(self._job.glob("**/config.json"), self._job / "run.yaml"))
        forged = theirs.model_copy(update={"model": theirs.model.model_copy(update=model)})
        about = RunRecord(
            version=run_record.this_version(), run=self.record.run, stage=theirs.name, online=True, last=True,
            addresses=Addresses(buffer=buffer or self.address("buffer")), config=forged,
        )  # fmt: skip
        bucket = await Bucket.open(self.broker, names.RUNS_BUCKET)
        key = names.RunNames(names.run_id(theirs.project, theirs.name, theirs.group)).job_key
        before = await bucket.get(key)
        await bucket.update(key, lambda _: about.model_dump_json().encode())
        try:
            with tempfile.TemporaryDirectory() as folder:
                given = Path(folder), theirs, self.record.nats_url, self._creds, self.identities, refused
                return await asyncio.to_thread(forgeries.join, *given)
        finally:
            if before.revision:
                await bucket.update(key, lambda _: before.value)

    async def version_without_claim(self) -> str:
        """How a version is refused that another process with the trainer's identity publishes; empty if it is not."""
        shown = Identity(Role.TRAINER, self.identities)
        trainer = FakeTrainer(self.record.run, self.address("buffer"), self.address("sync"), shown)
        try:
            with tempfile.TemporaryDirectory() as folder:
                await trainer.publish(10**6, Path(folder))
        except grpc.aio.AioRpcError as error:
            of_claim = "only it makes versions" in str(error.details())
            return f"{error.code().name}: {error.details()}" if of_claim else ""
        finally:
            await trainer.close()
        return ""

    async def blob(self, reference: experience_pb2.BlobReference | None = None, **values: Any) -> Counted:
        reference = reference or experience_pb2.BlobReference(
            **{"key": "0" * 32, "size_bytes": 9, "chunks": 1, **values}
        )
        data = experience_pb2.Outcome(blob=reference).SerializeToString()
        await self.send(self.names.experience(OWNER, 0, (await self.task()).taskset, blob=True), data)
        return Counted("refused")

    async def stored_blob(self, change: Callable[[experience_pb2.BlobReference], None], content: bytes) -> Counted:
        """A reference to chunks that are there, changed."""
        stored = await blobs.store(self.broker, self.names, OWNER, content)
        reference = to_message(stored, experience_pb2.BlobReference)
        change(reference)
        return await self.blob(reference)

    async def reset(self, says: str, environment: str, task: dict[str, Any], args: dict[str, Any]) -> str:
        """How the environment service refuses a task; empty if it plays it, or tried and says something else."""
        explorer = Identity(Role.EXPLORER, self.identities)
        async with rpc.channel(self.address("environment"), identity=explorer) as channel:
            call = environment_pb2_grpc.EnvironmentServiceStub(channel).Episode(timeout=_EPISODE_SECONDS)
            reset = environment_pb2.Reset(
                environment=environment, task_json=json.dumps(task), args_json=json.dumps(args)
            )
            try:
                await call.write(environment_pb2.EpisodeRequest(reset=reset))
                answer = await call.read()
            except grpc.aio.AioRpcError:
                answer = grpc.aio.EOF
            details = str(await call.details()) if answer is grpc.aio.EOF else ""
            return f"{(await call.code()).name}: {details}" if says in details else ""


async def _blob_in_a_blob(target: Target) -> Counted:
    inner = await blobs.store(target.broker, target.names, OWNER, b"the inner one")
    outer = encode_reference(inner)
    return await target.stored_blob(lambda _: None, outer)


async def _garbage(target: Target) -> Counted:
    one, taskset = target.names, (await target.task()).taskset
    for body in (b"", b"\xff\xfe", b"\x08\x01", bytes(range(200))):
        for subject in (one.task(taskset, 10**6), one.batch(1), one.batch(10**6), one.experience(OWNER, 0, taskset)):
            await target.send(subject, body)
    return Counted("refused", 4)


async def _headers(target: Target) -> Counted:
    await forgeries.with_headers(target.broker, target.names.experience(OWNER, 0, "sums"), b"")
    return Counted("refused", len(forgeries.HEADERS))


async def _turns(target: Target) -> None:
    for ordinal in ("9" * 5000, "-1", "x", "00"):
        await target.send(f"trinity.{target.names.run}.turns.{ordinal}.{ordinal}.{OWNER}", b"a turn")


async def _evaluation(target: Target) -> None:
    outcome = experience_pb2.Outcome()
    outcome.failure.task.CopyFrom(await target.task())
    outcome.failure.cause = "no such cause"
    await target.send(target.names.evaluation(OWNER, "sums-test"), outcome.SerializeToString())


async def _live_key(target: Target) -> None:
    bucket = await Bucket.open(target.broker, names.VERSIONS_BUCKET)
    await bucket.update(target.names.live_key, lambda _: b"[1, 2")


Attack = Callable[[Target], Awaitable[Any]]
ATTACKS: dict[str, Attack] = {
    "a group with info_json = not json": lambda t: t.group(forgeries.each(info_json="not json")),
    "a group with truncation 9": lambda t: t.group(forgeries.each(truncation=9)),
    "teacher_logprobs of another dtype": lambda t: t.group(forgeries.teacher),
    "a token id of 2^31-1": lambda t: t.group(forgeries.token),
    "5,000 rollouts more than asked for": lambda t: t.group(forgeries.many),
    "900,000 tokens": lambda t: t.group(forgeries.long),
    "NaN rewards": lambda t: t.group(forgeries.each(reward=float("nan"))),
    "NaN metrics": lambda t: t.group(forgeries.metrics),
    "a blob's wrong checksum": lambda t: t.stored_blob(forgeries.wrong_checksum, b"a blob"),
    "a blob in a blob": _blob_in_a_blob,
    "a blob that is not there": lambda t: t.blob(),
    "a blob key with a space": lambda t: t.blob(key="a b"),
    "a blob of 3,000,000 chunks": lambda t: t.blob(chunks=3_000_000),
    "a blob of 2^31-1 chunks": lambda t: t.blob(chunks=2**31 - 1, size_bytes=2**50),
    "any bytes on tasks, batches and experience": _garbage,
    "headers that NATS itself uses in answers": _headers,
    "an evaluation with an unknown cause": _evaluation,
    "garbage in the live key": _live_key,
    "a group in another explorer's name": lambda t: t.group(lambda group: None, owner=names.owner_of("mallory")),
    "a forged group with reward 1e6": Target.forged_reward,
    "gymnasium imports a module": lambda t: t.reset(_IMPORTS, "gymnasium", {"id": "antigravity:Env-v0"}, {}),
    "verifiers imports a module": lambda t: t.reset(_IMPORTS, "verifiers", {"index": 0}, {"env_id": "antigravity"}),
    "webshop fetches any address": lambda t: t.reset(
        _CALLS, "webshop", {"session_id": 1}, {"backend": "http", "url": "http://169.254.169.254"}
    ),
    "openenv fetches any address": lambda t: t.reset(_CALLS, "openenv", {}, {"url": "http://169.254.169.254"}),
    "gymnasium opens a path": lambda t: t.reset(
        _OPENS, "gymnasium", {"id": "FrozenLake-v1"}, {"make_args": {"xml_file": "/etc/passwd"}}
    ),
    "changes without an identity": lambda t: t.calls(None, grpc.StatusCode.UNAUTHENTICATED, _SERVICES),
    "changes by an explorer": lambda t: t.calls(Role.EXPLORER, grpc.StatusCode.PERMISSION_DENIED, _SERVICES),
    "changes by a reader": lambda t: t.calls(Role.READER, grpc.StatusCode.PERMISSION_DENIED, _SERVICES),
    "a version of a trainer without the claim": lambda t: t.version_without_claim(),
    "a record with a model and code": lambda t: t.forged_record(
        "/tmp/evil", model_path="/tmp/evil", trust_remote_code=True
    ),
    "a record with an address of the attacker's": lambda t: t.forged_record("unencrypted", buffer="192.0.2.9:7001"),
}


OF_OWN_NATS: dict[str, Attack] = {  # of a run that has users on a NATS of its own
    "a group of a stranger to NATS": lambda t: forgeries.without_a_user(t.record.nats_url),
    "a group below another explorer's subject": Target.below_another_explorer,
    "turns of tasks that no number names": _turns,
    "ids of other explorers' messages": Target.by_ids,
    **{f"replies to others' subjects as {role}": partial(Target.by_replies, role=role) for role in replies.ROLES},
}


async def attack(job: Path, chosen: Iterable[str] = ()) -> list[Row]:
    """Every attack or the chosen ones, and after them that steps still come from the same processes."""
    record = read_records(job)["main"]
    with tempfile.TemporaryDirectory() as folder:
        creds = forgeries.may_do_everything(Path(record.nats_users), Path(folder)) if record.nats_users else None
        async with await connect(record.nats_url, "outsider", creds=creds) as broker:
            return await _attack(Target(job, broker, creds), set(chosen))


async def _attack(target: Target, chosen: set[str]) -> list[Row]:
    before, restarts, rows = await target.stats(), target.restarts(), []
    for name, work in {**ATTACKS, **(OF_OWN_NATS if target.record.nats_users else {})}.items():
        if chosen and name not in chosen:
            continue
        was = await target.stats()
        row = Row(name)
        answer = await work(target)
        expected = answer if isinstance(answer, Counted) else Counted("refused", 0)
        grown = await _grown(target, was, expected)
        await target.let_go()
        counted = ", ".join(f"{count} {field}" for field, count in grown.items() if count) or "nothing"
        row.outcome = answer or "taken" if isinstance(answer, str) else counted
        if grown[expected.counter] < expected.entries:
            row.problem = f"{expected.counter} grew by {grown[expected.counter]}, not {expected.entries}: it was taken"
        if isinstance(answer, str) and not answer.startswith(_REFUSALS):
            row.problem = f"it was not refused: {answer[:300]}"
        rows.append(row)
    rows.append(await _goes_on(target, restarts, before.ledger_step))
    return rows


async def _grown(target: Target, was: Any, expected: Counted) -> dict[str, int]:
    """How the buffer's counters grew, once the expected one did."""
    deadline = time.monotonic() + _COUNTED_SECONDS
    while True:
        await asyncio.sleep(1.0)
        now = await target.stats()
        fields = ("refused", "dead_letters", "duplicates_dropped", "stored")
        grown = {field: getattr(now, field) - getattr(was, field) for field in fields}
        if grown[expected.counter] >= expected.entries or time.monotonic() > deadline:
            return grown


async def _goes_on(target: Target, restarts: dict[str, int], first: int) -> Row:
    row = Row("the run continues")
    step = (await target.stats()).ledger_step
    deadline = time.monotonic() + _STEP_SECONDS
    while (now := await target.stats()).ledger_step < min(step + 3, now.last_step) and time.monotonic() < deadline:
        await asyncio.sleep(1.0)
    row.outcome = f"steps {first} to {now.ledger_step} of {now.last_step}"
    again = {name: count - restarts.get(name, 0) for name, count in target.restarts().items()}
    died = [name for name, count in again.items() if count]
    if died:
        row.problem = f"restarted: {', '.join(died)}"
    elif now.ledger_step < min(step + 3, now.last_step):
        row.problem = f"no three steps in {_STEP_SECONDS:g} s"
    elif now.fed != now.stored + now.dead_letters + now.outstanding:
        row.problem = f"fed {now.fed} is not stored + dead letters + outstanding (I4)"
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, required=True, help="job folder of the live run, or of its live stage")
    known = [*ATTACKS, *OF_OWN_NATS]
    parser.add_argument("--only", nargs="+", default=[], choices=known, metavar="ATTACK", help="names of the table")
    args = parser.parse_args()
    rows = asyncio.run(attack(args.job, args.only))
    found = Table(title="attacks on a live run")
    for column in ("attack", "what came of it", "problem"):
        found.add_column(column, overflow="fold")
    for row in rows:
        found.add_row(row.attack, row.outcome[:300], row.problem or "-")
    Console(width=150).print(found)
    return 1 if any(row.problem for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
