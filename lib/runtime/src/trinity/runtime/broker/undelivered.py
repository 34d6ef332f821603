"""Returns messages of a dead holder, or of a NATS server that died, to their queue before their lease ends."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterable

import nats.errors
import nats.js.errors
import structlog
from nats.aio.msg import Msg
from nats.js.api import ConsumerInfo

from trinity.runtime.broker.connection import Broker
from trinity.runtime.broker.consume import sequence_of

log = structlog.get_logger(__name__)

_LOOK_SECONDS = 0.5
_ANSWER_SECONDS = 1.0
# Of a replica that the leader hears every second.
_LOST_SECONDS = 2.5


async def return_leases(broker: Broker, leases: Iterable[str]) -> None:
    """Return messages that a dead process held (`Message.lease`).

    NATS does not compare deliveries. Returning a lease that has ended takes the message from its present holder.
    """
    try:
        for lease in leases:
            await broker.client.publish(lease, Msg.Ack.Nak)
        await broker.client.flush()
    except (nats.errors.Error, OSError) as error:  # then they end by their time
        log.info("broker.leases.unreturned", error=f"{type(error).__name__} {error}".strip())


async def return_undelivered(broker: Broker, stream: str, durable: str) -> None:
    """Once a server of the consumer is lost, return what was sent through it and no process has received.

    After an election that is all that the leader before sent. A process that receives a message says so at once
    (`Message.extend`), and is heard here as by the server. What was said while this connection was lost is not heard:
    such a message is delivered twice. Runs without end.
    """
    queue = _Queue(broker, stream, durable)
    await broker.client.subscribe(f"{queue.subject}.>", cb=queue.hear)
    jsm = broker.client.jsm(timeout=_ANSWER_SECONDS)
    while True:
        with contextlib.suppress(TimeoutError, nats.errors.Error, nats.js.errors.Error, OSError):  # repeated later
            await queue.look(await jsm.consumer_info(stream, durable))
        await asyncio.sleep(_LOOK_SECONDS)


class _Queue:
    """The reports on the messages of one consumer."""

    def __init__(self, broker: Broker, stream: str, durable: str) -> None:
        self.subject = f"$JS.ACK.{stream}.{durable}"
        self._broker = broker
        self._leader = ""
        self._heard_from = 0  # of messages up to this sequence there may be holders that were not heard
        self._heard: set[int] = set()
        self._delivered: deque[int] = deque(maxlen=3)  # as the last looks found it

    async def hear(self, raw: Msg) -> None:
        self._heard.add(sequence_of(raw.subject))

    async def look(self, info: ConsumerInfo) -> None:
        if info.delivered is None or info.ack_floor is None:
            return
        self._heard_from = max(self._heard_from, info.ack_floor.stream_seq)
        self._heard = {sequence for sequence in self._heard if sequence > self._heard_from}
        if info.cluster is None or not info.cluster.leader:
            return
        leader = info.cluster.leader
        self._delivered.append(info.delivered.stream_seq)
        if not self._leader:
            self._heard_from = info.delivered.stream_seq
        elif leader != self._leader:
            await self._return(info.delivered.stream_seq, info.delivered.consumer_seq)
        elif any((peer.active or 0) > _LOST_SECONDS * 1e9 for peer in info.cluster.replicas or []):
            await self._return(self._delivered[0], info.delivered.consumer_seq)  # the newest may be on their way
        self._leader = leader

    async def _return(self, through: int, delivery: int) -> None:
        """Say what a holder of each would say. The server ignores it for a message that is not leased."""
        lost = [sequence for sequence in range(self._heard_from + 1, through + 1) if sequence not in self._heard]
        for sequence in lost:
            await self._broker.client.publish(f"{self.subject}.1.{sequence}.{delivery}.{time.time_ns()}.0", Msg.Ack.Nak)
        self._heard.update(lost)
        if lost:
            log.info("broker.undelivered.returned", consumer=self.subject, sequences=lost)
