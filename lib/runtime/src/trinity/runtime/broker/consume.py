"""Reading streams: leases on a shared consumer, and a tail of a log that detects every gap."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from dataclasses import dataclass

import nats.errors
import nats.js.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, Header

from trinity.runtime.broker.connection import Broker, StoredMessage
from trinity.runtime.errors import DataLoss, NotFound, Unavailable

log = structlog.get_logger(__name__)

_MAX_BYTES = 16 * 1024 * 1024
_TAIL_BATCH = 256
_SHORT_REPLY = 9
_EXPIRES_SECONDS = 30.0
_HEARTBEAT_SECONDS = 1.0
# A new consumer begins at the sequence that is expected: if it skips that too, it is not there.
_ASKED_AGAIN = 2
_REQUEST_ENDED = ("Batch Completed", "Message Size Exceeds MaxBytes")


@dataclass(frozen=True)
class Message:
    """A delivered message. `deliveries` counts from 1."""

    subject: str
    data: bytes
    headers: dict[str, str]
    sequence: int
    deliveries: int
    pending: int
    _raw: Msg

    @classmethod
    def of(cls, raw: Msg) -> "Message":
        deliveries, sequence, _, _, pending = _numbers(raw.reply)
        return cls(raw.subject, raw.data, dict(raw.headers or {}), sequence, deliveries or 1, pending, raw)

    @property
    def lease(self) -> str:
        """The reply subject of this delivery, which `return_leases` takes."""
        return str(self._raw.reply)

    # A lost answer to the broker costs another delivery, and deduplication makes that harmless: so none of these raise.

    async def ack(self, timeout_seconds: float = 5.0) -> bool:
        """Acknowledge; True once the server has it."""
        return await self._tell(self._raw.ack_sync(timeout_seconds))

    async def retry(self, delay_seconds: float = 0.0) -> bool:
        """Give the message back for another delivery."""
        return await self._tell(self._raw.nak(delay=delay_seconds or None))

    async def extend(self) -> bool:
        """Keep the lease."""
        return await self._tell(self._raw.in_progress())

    async def _tell(self, call: Awaitable[object]) -> bool:
        try:
            await call
        except (TimeoutError, nats.errors.Error, OSError) as error:
            log.info(
                "broker.message.unreported", sequence=self.sequence, error=f"{type(error).__name__} {error}".strip()
            )
            return False
        return True


def sequence_of(reply: str) -> int:
    """In its stream: of the message whose answers go to this subject."""
    return _numbers(reply)[1]


def _numbers(reply: str) -> list[int]:
    # Four times as fast as `raw.metadata`, which makes a date of the time, for every message:
    # $JS.ACK.[<domain>.<account>.]<stream>.<consumer>.<deliveries>.<sequence>.<consumer's>.<time>.<pending>[...]
    fields = reply.split(".")
    at = 4 if len(fields) == _SHORT_REPLY else 6
    return list(map(int, fields[at : at + 5]))


class Gap(DataLoss):
    """Messages are missing from a log and were not purged by Trinity."""


class _Pull:
    """Pull requests on one consumer; messages come as they are stored, not when a request is full."""

    def __init__(self, broker: Broker, stream: str, consumer: str) -> None:
        self._broker = broker
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox = broker.client.new_inbox()
        self._requests = 0
        self._subscription: Subscription | None = None
        self._arrived: asyncio.Queue[Msg] = asyncio.Queue()

    async def open(self) -> None:
        # The size of each request is the bound; the client's own limits must not drop messages silently.
        self._subscription = await self._broker.client.subscribe(
            f"{self._inbox}.*", cb=self._arrived.put, pending_msgs_limit=-1, pending_bytes_limit=-1
        )

    async def close(self) -> None:
        if self._subscription is not None:
            with contextlib.suppress(Exception):
                await self._subscription.unsubscribe()
            self._subscription = None

    async def _next(self, silence_seconds: float) -> Msg:
        """Raises TimeoutError after the silence, PermissionDenied at once. An arrived message costs no timer."""
        if not self._arrived.empty():
            return self._arrived.get_nowait()
        async with self._broker.client.refusable(self._subject, silence_seconds):
            return await self._arrived.get()

    async def request(self, batch: int, expires_seconds: float, heartbeat: bool = False) -> AsyncIterator[Message]:
        """Messages of one request, each as soon as it is there, until `batch` came or the time is over.

        Raises nats errors when the consumer or the server is gone; with `heartbeat` within three seconds.
        """
        assert self._subscription is not None
        self._requests += 1
        reply = f"{self._inbox}.{self._requests}"
        body = {"batch": batch, "expires": int(expires_seconds * 1e9), "max_bytes": _MAX_BYTES}
        silence = expires_seconds + 2.0
        if heartbeat:
            body["idle_heartbeat"] = int(_HEARTBEAT_SECONDS * 1e9)
            silence = 3 * _HEARTBEAT_SECONDS
        await self._broker.client.publish(self._subject, json.dumps(body).encode(), reply=reply)
        received = 0
        while received < batch:
            raw = await self._next(silence)
            status = (raw.headers or {}).get(Header.STATUS.value)
            if not status:
                received += 1
                yield Message.of(raw)
            elif raw.subject == reply and status != "100":  # statuses of earlier requests come late
                description = (raw.headers or {}).get(Header.DESCRIPTION.value, "")
                if status in ("404", "408") or description in _REQUEST_ENDED:
                    return
                raise nats.js.errors.APIError(code=int(status), description=description)


async def ensure_consumer(
    broker: Broker, stream: str, durable: str, *, lease_seconds: float, max_leases: int = 100_000
) -> None:
    """The consumer of a PullConsumer, made if missing."""
    config = ConsumerConfig(
        durable_name=durable,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=lease_seconds,
        max_deliver=-1,
        max_ack_pending=max_leases,
        max_waiting=4096,
    )
    await broker.request(lambda: broker.js.add_consumer(stream, config), f"consumer {durable} of {stream}")


class PullConsumer:
    """A durable consumer shared by many processes: the process that gets a message holds a lease on it."""

    def __init__(self, pull: _Pull) -> None:
        self._pull = pull

    @classmethod
    async def open(cls, broker: Broker, stream: str, durable: str) -> "PullConsumer":
        """A consumer that `ensure_consumer` made. Unavailable if it does not exist (yet)."""
        try:
            await broker.request(lambda: broker.js.consumer_info(stream, durable), f"consumer {durable} of {stream}")
        except nats.js.errors.NotFoundError:
            raise Unavailable(f"NATS has no consumer {durable} of stream {stream} yet") from None
        pull = _Pull(broker, stream, durable)
        await pull.open()
        return cls(pull)

    async def close(self) -> None:
        await self._pull.close()

    async def lease(self, batch: int, wait_seconds: float) -> AsyncIterator[Message]:
        """Up to `batch` messages, each as soon as there is one, for at most `wait_seconds`.

        Read it to its end: an unread message stays leased until the lease expires. A server that is away
        ends it early, after a short rest.
        """
        try:
            async for message in self._pull.request(batch, wait_seconds):
                yield message
        except (TimeoutError, nats.errors.Error, nats.js.errors.Error, OSError) as error:
            log.info("broker.lease.interrupted", error=f"{type(error).__name__} {error}".strip())
            await asyncio.sleep(0.2)


async def on_subject(
    broker: Broker, stream: str, subject: str, from_sequence: int = 1, read_ahead: int = 0
) -> AsyncIterator[StoredMessage]:
    """The messages of a stream under a subject that are there now, oldest first. `read_ahead`: where many are."""
    with contextlib.suppress(NotFound):
        while True:
            message = await broker.next(stream, subject, from_sequence)
            yield message
            ahead = await broker.several(stream, message.sequence + 1, read_ahead, subject) if read_ahead else []
            for message in ahead:
                yield message
            from_sequence = message.sequence + 1


async def tail(broker: Broker, stream: str, after_sequence: int) -> AsyncIterator[Message]:
    """Yields every message of a stream above `after_sequence`, in order, for ever.

    Messages lost on the way, for example with a dying server, are requested again. Raises Gap if a sequence is missing
    in the stream: a corrupted replica skips silently, and our own purges stay below every reader.
    """
    expected, skipped = after_sequence + 1, 0
    while True:
        try:
            async with contextlib.aclosing(_tail_once(broker, stream, expected)) as messages:
                async for message in messages:
                    if message.sequence != expected:
                        skipped += 1
                        if skipped > _ASKED_AGAIN:
                            raise Gap(
                                f"{stream}: sequences {expected} to {message.sequence - 1} are missing and were not "
                                "purged by Trinity. A replica is damaged or messages were deleted by hand: compare the "
                                "replicas (`nats stream report`) and restore the stream"
                            )
                        log.info("broker.tail.skipped", stream=stream, sequence=expected, came=message.sequence)
                        break
                    expected, skipped = message.sequence + 1, 0
                    yield message
        except (TimeoutError, nats.errors.Error, nats.js.errors.Error, OSError) as error:
            log.info("broker.tail.reopened", stream=stream, sequence=expected, error=str(error))
            await asyncio.sleep(0.2)


async def _tail_once(broker: Broker, stream: str, start: int) -> AsyncGenerator[Message, None]:
    config = ConsumerConfig(
        deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=start,
        ack_policy=AckPolicy.NONE,
        inactive_threshold=60.0,
        mem_storage=True,
        num_replicas=1,
    )
    info = await broker.js.add_consumer(stream, config)
    pull = _Pull(broker, stream, info.name)
    await pull.open()
    try:
        while True:
            async for message in pull.request(_TAIL_BATCH, _EXPIRES_SECONDS, heartbeat=True):
                yield message
    finally:
        await pull.close()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(broker.js.delete_consumer(stream, info.name), 1)
