"""Connection to JetStream: publish that always resolves, direct reads, purge."""

import asyncio
import contextlib
import itertools
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import nats.errors
import nats.js.errors
import structlog
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import Header

from trinity.runtime.broker.client import Client
from trinity.runtime.errors import (
    DataLoss,
    Full,
    InvalidInput,
    NotFound,
    PermissionDenied,
    TrinityError,
    Unavailable,
)

log = structlog.get_logger(__name__)

_WRONG_LAST_SEQUENCE = (10071, 10164)
_NO_ROOM = (10077, 10122, 10047, 10023)  # stream full, resources exceeded, storage exceeded
_NO_ANSWER = "no answer from JetStream"
_CLUSTER_REPLICAS = 3
_RETRY_SECONDS = (0.002, 1.0)
_MOST_BYTES = 4 * 1024 * 1024
# A publish is repeated after a second without an answer, and as long as its bytes take: a stream whose leader died has
# another after at most nine, and hears of nothing before.
_TRY_SECONDS, _TRY_BYTES_PER_SECOND = 1.0, 10e6


class PublishRefused(Full):
    """The stream or the disk has no room: back-pressure."""


class SequenceConflict(TrinityError):
    """Another process wrote at the expected sequence; or the message id is known, `stored_at` another sequence."""

    stored_at = 0


@dataclass(frozen=True)
class Stored:
    """A message's place in its stream."""

    sequence: int
    duplicate: bool


@dataclass(frozen=True)
class StoredMessage:
    """A message read back from its stream."""

    sequence: int
    subject: str
    data: bytes
    headers: dict[str, str]


@dataclass(frozen=True)
class StreamState:
    """Contents and limit of a stream, in bytes; max_bytes -1: no limit."""

    first_sequence: int
    last_sequence: int
    messages: int
    bytes: int
    max_bytes: int


@dataclass(frozen=True)
class ConsumerState:
    """Messages of a consumer: waiting for delivery, delivered and not acknowledged, and those among the latter that
    were delivered before."""

    queued: int
    leased: int
    redelivered: int


def new_message_id() -> str:
    """Returns an id for one message and its repetitions, which nobody else can send before.

    JetStream drops a message whose id it knows, whoever sent it under whichever subject: in a stream with several
    writers, an id that can be guessed lets each of them drop the others' messages.
    """
    return secrets.token_hex(12)


def is_cancelled() -> bool:
    """Returns True if this task was cancelled: nats-py forgets it if a message comes at the same moment."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Acks:
    """JetStream's answers to publishes, told apart by their reply subject: one future and one timer each, no task."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._inbox = client.new_inbox()
        self._numbers = itertools.count()
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        self._open: asyncio.Task[Any] | None = None

    async def publish(self, subject: str, data: bytes, headers: dict[str, str], seconds: float) -> Stored:
        """Raises TimeoutError, PermissionDenied, or what JetStream or the connection says."""
        if self._open is None:
            self._open = asyncio.ensure_future(self._client.subscribe(f"{self._inbox}.*", cb=self._take))
        await asyncio.shield(self._open)
        loop = asyncio.get_running_loop()
        reply, answer = f"{self._inbox}.{next(self._numbers)}", loop.create_future()
        self._waiting[reply] = answer
        timer = loop.call_later(seconds, _expire, answer)
        try:
            with self._client.told_of_refusal(subject, partial(_refuse, answer)):
                await self._client.publish(subject, data, reply=reply, headers=dict(headers))
                return _stored(await answer)
        finally:
            timer.cancel()
            del self._waiting[reply]

    async def _take(self, message: Msg) -> None:
        answer = self._waiting.get(message.subject)
        if answer is not None and not answer.done():
            answer.set_result(message)


def _expire(answer: "asyncio.Future[Msg]") -> None:
    if not answer.done():
        answer.set_exception(TimeoutError(_NO_ANSWER))


def _refuse(answer: "asyncio.Future[Msg]", reason: str) -> None:
    if not answer.done():
        answer.set_exception(PermissionDenied(reason))


def _stored(message: Msg) -> Stored:
    """Returns JetStream's answer. Raises APIError, or NoStreamResponseError if no stream listens on the subject."""
    if (message.headers or {}).get(Header.STATUS.value) == "503":
        raise nats.js.errors.NoStreamResponseError
    answer = json.loads(message.data)
    if "error" in answer:
        raise nats.js.errors.APIError.from_error(answer["error"])
    return Stored(int(answer["seq"]), bool(answer.get("duplicate")))


class Broker:
    """One connection. Made by connect.py; closed by `close` or by leaving the `async with`."""

    def __init__(self, client: Client, request_seconds: float) -> None:
        self.client = client
        self.request_seconds = request_seconds
        self.js: JetStreamContext = client.jetstream(timeout=request_seconds)
        self._acks = _Acks(client)

    @property
    def usual_replicas(self) -> int:
        """Replicas of a stream unless configured: three in a cluster, one on a single server."""
        return _CLUSTER_REPLICAS if self.client._server_info.get("cluster") else 1

    async def __aenter__(self) -> "Broker":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.client.flush(timeout=1), 2)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.client.close(), 2)

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        message_id: str,
        headers: dict[str, str] | None = None,
        expected_last_sequence: int | None = None,
        first_on_subject: bool = False,
        deadline_seconds: float = 60.0,
        on_refused: Callable[[str], None] | None = None,
    ) -> Stored:
        """Store one message; safe to repeat under the same `message_id`. `on_refused` hears at once of a lack of room.
        `first_on_subject`: only if its subject has no message.

        Raises SequenceConflict, PublishRefused (no room until the deadline), PermissionDenied, InvalidInput (larger
        than NATS takes), or Unavailable (no answer until the deadline; the message may or may not be stored).
        """
        all_headers = {**(headers or {}), Header.MSG_ID.value: message_id}
        if expected_last_sequence is not None:
            all_headers[Header.EXPECTED_LAST_SEQUENCE.value] = str(expected_last_sequence)
        if first_on_subject:
            all_headers[Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value] = "0"
        deadline = time.monotonic() + deadline_seconds
        pause, problem = _RETRY_SECONDS[0], ""
        refused = False
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                kind = PublishRefused if refused else Unavailable
                if _NO_ANSWER in problem and self.client.is_connected:
                    problem += "; its disk may be full: after a failed write nats-server answers no message"
                raise kind(f"NATS did not store a message on {subject} within {deadline_seconds:g} s: {problem}")
            seconds = min(left, _TRY_SECONDS + len(data) / _TRY_BYTES_PER_SECOND)
            try:
                return await self._acks.publish(subject, data, all_headers, seconds)
            except nats.errors.MaxPayloadError:
                problem = f"on {subject} has {len(data)} bytes, NATS takes {self.most_bytes}"
                raise InvalidInput("message", problem) from None
            except nats.js.errors.APIError as error:
                if error.err_code in _WRONG_LAST_SEQUENCE:
                    raise SequenceConflict(f"{subject}: {error.description}") from None
                if error.code not in (503, 500, 429) and error.err_code not in _NO_ROOM:
                    raise
                refused = error.err_code in _NO_ROOM
                problem = str(error.description or error)
                if refused and on_refused is not None:
                    on_refused(problem)
            except (TimeoutError, nats.errors.Error, nats.js.errors.Error, OSError) as error:
                refused, problem = False, f"{type(error).__name__} {error}".strip()
            await asyncio.sleep(min(pause, max(deadline - time.monotonic(), 0)))
            pause = min(pause * 2, _RETRY_SECONDS[1])

    async def append(
        self, subject: str, stream: str, data: bytes, *, message_id: str, last_sequence: int, **kwargs: Any
    ) -> int:
        """Store a message at exactly `last_sequence + 1` of the stream, once; returns that sequence.

        A retry after a lost answer finds its own message there and succeeds. SequenceConflict if another one is.
        """
        stored_at = 0
        try:
            stored = await self.publish(
                subject, data, message_id=message_id, expected_last_sequence=last_sequence, **kwargs
            )
            if stored.sequence == last_sequence + 1:
                return stored.sequence
            stored_at = stored.sequence
            problem = f"message id {message_id} is stored at {stored_at} already"
        except SequenceConflict as error:
            problem = str(error)
        with contextlib.suppress(NotFound):
            there = await self.get(stream, last_sequence + 1)
            if there.headers.get(Header.MSG_ID.value) == message_id:
                return there.sequence
        conflict = SequenceConflict(f"{stream} at {last_sequence + 1}: {problem}")
        conflict.stored_at = stored_at
        raise conflict

    async def request(self, call: Any, what: str, deadline_seconds: float = 30.0) -> Any:
        """Await `call()` again until NATS answers; Unavailable after the deadline. For calls that may be repeated.

        Raises PermissionDenied at once if NATS forbids the subject.
        """
        deadline = time.monotonic() + deadline_seconds
        while True:
            try:
                answer = await call()
                if is_cancelled():
                    raise asyncio.CancelledError
                return answer
            except (nats.js.errors.NotFoundError, nats.js.errors.BadRequestError):
                raise
            except nats.js.errors.ServerError as error:
                if error.err_code in _NO_ROOM:
                    raise
                problem: Exception = error
            except (TimeoutError, nats.errors.Error, nats.js.errors.Error, OSError) as error:
                problem = error
            if time.monotonic() > deadline:
                raise Unavailable(f"NATS did not answer ({what}): {type(problem).__name__} {problem}") from None
            await asyncio.sleep(0.1)

    async def get(self, stream: str, sequence: int) -> StoredMessage:
        """The message at a sequence. NotFound if it is not there (any more)."""
        return await self._get(stream, seq=sequence)

    @property
    def most_bytes(self) -> int:
        """The server's limit of one message with its headers, in bytes."""
        return self.client.max_payload

    async def last(self, stream: str, subject: str) -> StoredMessage:
        """The newest message on a subject. NotFound if there is none."""
        return await self._get(stream, subject=subject)

    async def next(self, stream: str, subject: str, from_sequence: int) -> StoredMessage:
        """The first message at or above a sequence whose subject fits a filter. NotFound if there is none."""
        return await self._get(stream, seq=from_sequence, subject=subject, next=True)

    async def several(self, stream: str, from_sequence: int, most: int, subject: str = "") -> list[StoredMessage]:
        """The first messages at or above a sequence, in one request. Some only: for a reader ahead of its need.

        The answer is bounded in bytes, and a server that falls silent ends it; one older than 2.11 sends one message.
        `subject` filters them.
        """
        inbox = self.client.new_inbox()
        subscription = await self.client.subscribe(inbox, pending_msgs_limit=-1, pending_bytes_limit=-1)
        question: dict[str, int | str] = {"seq": from_sequence, "batch": most, "max_bytes": _MOST_BYTES}
        if subject:
            question["next_by_subj"] = subject
        found: list[StoredMessage] = []
        try:
            asked = f"$JS.API.DIRECT.GET.{stream}"
            await self.client.publish(asked, json.dumps(question).encode(), reply=inbox)
            while len(found) < most:
                async with self.client.refusable(asked):
                    raw = await subscription.next_msg(self.request_seconds)
                fields = raw.headers or {}
                if Header.STATUS.value in fields:  # the end of the answer
                    break
                sequence, subject = int(fields["Nats-Sequence"]), fields["Nats-Subject"]
                found.append(StoredMessage(sequence, subject, raw.data, dict(fields)))
                if int(fields.get("Nats-Num-Pending", 0)) == 0:
                    break
        except (TimeoutError, nats.errors.Error) as error:
            log.info("broker.answer.short", stream=stream, messages=len(found), error=type(error).__name__)
        finally:
            with contextlib.suppress(Exception):
                await subscription.unsubscribe()
        return found

    async def _get(self, stream: str, **key: Any) -> StoredMessage:
        try:
            raw = await self.request(lambda: self.js.get_msg(stream, direct=True, **key), f"read {stream} {key}")
        except nats.js.errors.NotFoundError:
            raise NotFound(f"{stream} has no message at {key}") from None
        if raw.seq is None or raw.subject is None:
            raise DataLoss(f"{stream} answered {key} without sequence or subject")
        return StoredMessage(raw.seq, raw.subject, raw.data or b"", dict(raw.headers or {}))

    async def state(self, stream: str) -> StreamState:
        try:
            info = await self.request(lambda: self.js.stream_info(stream), f"state of {stream}")
        except nats.js.errors.NotFoundError:
            raise NotFound(f"NATS has no stream {stream}") from None
        state = info.state
        return StreamState(state.first_seq, state.last_seq, state.messages, state.bytes, info.config.max_bytes)

    async def subjects(self, stream: str) -> list[str]:
        """Subjects that have messages, and are few. NotFound without the stream."""
        if not (await self.state(stream)).messages:
            return []
        info = await self.request(lambda: self.js.stream_info(stream, subjects_filter=">"), f"subjects of {stream}")
        return list(info.state.subjects or {})

    async def consumer(self, stream: str, name: str) -> ConsumerState:
        try:
            info = await self.request(lambda: self.js.consumer_info(stream, name), f"state of {stream}'s {name}")
        except nats.js.errors.NotFoundError:
            raise NotFound(f"NATS has no consumer {name} of {stream}") from None
        return ConsumerState(info.num_pending or 0, info.num_ack_pending or 0, info.num_redelivered or 0)

    async def storage_bytes(self) -> int:
        """In files, of all streams of this account."""
        return int((await self.request(self.js.account_info, "account")).storage)

    async def purge_below(self, stream: str, sequence: int) -> None:
        """Remove every message with a lower sequence."""
        await self.request(lambda: self.js.purge_stream(stream, seq=sequence), f"purge {stream}")

    async def purge_subject(self, stream: str, subject: str) -> None:
        """Remove every message whose subject fits a filter."""
        await self.request(lambda: self.js.purge_stream(stream, subject=subject), f"purge {subject}")

    async def delete(self, stream: str, sequence: int, erase: bool = False) -> None:
        """Remove one message; quietly if it is gone.

        `erase`: overwrite its bytes on the disk, which takes five times as long.
        """
        subject, asked = f"$JS.API.STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": not erase}
        with contextlib.suppress(nats.js.errors.NotFoundError, nats.js.errors.BadRequestError):
            await self.request(lambda: self._ask(subject, asked), f"delete from {stream}")

    async def _ask(self, subject: str, asked: dict[str, Any]) -> None:
        answer = await self.client.request(subject, json.dumps(asked).encode(), timeout=self.request_seconds)
        if error := json.loads(answer.data).get("error"):
            raise nats.js.errors.APIError.from_error(error)
