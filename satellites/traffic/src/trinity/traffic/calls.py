"""Keeps plain calls of the endpoint in the run's stream of traffic, where rewards find them at any explorer.

    keep(id, key, experience) -> reward(id, key, reward), once, or forget(id, key)

A call belongs to the client whose key it had. JetStream stores the first reward of an id only, whichever explorers
receive others at the same time. The buffer makes a task of each reward (rewards.py).
"""

import asyncio
import hashlib
import hmac
import time
from dataclasses import dataclass, replace

from nats.js.api import Header

from trinity.data.experience import Experience, Limits
from trinity.data.traffic import IS_CALL, CallReward, RecordedCall
from trinity.data.wire import decode_call, encode_call, encode_reward
from trinity.runtime.broker import Broker, SequenceConflict, new_message_id
from trinity.runtime.errors import Conflict, NotFound
from trinity.runtime.names import RunNames, owner_of

_KEEP_SECONDS = 2.0  # that NATS has for a call
_SECONDS = 10.0


@dataclass(frozen=True)
class Calls:
    """The recorded calls of a run, as one explorer reads and writes them."""

    broker: Broker
    names: RunNames
    explorer_id: str
    limits: Limits

    async def keep(self, call_id: str, key: str, experience: Experience) -> None:
        """Store a call. Raises InvalidInput if no trainer could take it, and TrinityError if NATS does not store it."""
        experience.check("call.experience", self.limits)
        data = encode_call(RecordedCall(experience, _sha256(key), time.time()))
        subject = self.names.call(call_id, owner_of(self.explorer_id))
        await self.broker.publish(
            subject, data, message_id=new_message_id(), first_on_subject=True, deadline_seconds=_KEEP_SECONDS
        )

    async def experience(self, call_id: str, reward: float) -> Experience:
        """A recorded call with its reward. Raises NotFound if it expired or was deleted."""
        _, call = await self._find(call_id)
        return replace(call.experience, reward=reward)

    async def reward(self, call_id: str, key: str, reward: float) -> None:
        """Store a call's reward. Raises InvalidInput, NotFound, and Conflict for a second reward."""
        _, call = await self._own(call_id, key)
        spans = call.experience.version_spans
        given = CallReward(call_id, reward, spans[0].version, spans[-1].version)
        given.check(self.limits)
        subject, message_id = self.names.call_reward(call_id), new_message_id()
        try:
            await self.broker.publish(
                subject,
                encode_reward(given),
                message_id=message_id,
                first_on_subject=True,
                deadline_seconds=_SECONDS,
            )
        except SequenceConflict:
            there = await self.broker.last(self.names.traffic_stream, subject)
            if there.headers.get(Header.MSG_ID.value) != message_id:  # else an answer was lost
                raise Conflict(f"id: {call_id} has a reward; a call has one") from None

    async def forget(self, call_id: str, key: str) -> None:
        """Overwrite a call, and its reward, in the stream's files. Raises NotFound."""
        sequence, _ = await self._own(call_id, key)
        await self.broker.delete(self.names.traffic_stream, sequence, erase=True)
        try:
            given = await self.broker.last(self.names.traffic_stream, self.names.call_reward(call_id))
        except NotFound:
            return
        await self.broker.delete(self.names.traffic_stream, given.sequence, erase=True)

    async def _own(self, call_id: str, key: str) -> tuple[int, RecordedCall]:
        """A call of this client, with its sequence. Other clients' calls look like unknown ones."""
        try:
            found = await self._find(call_id)
        except NotFound:
            if not IS_CALL.fullmatch(call_id):
                raise
            await asyncio.sleep(_KEEP_SECONDS)  # another explorer may be storing it
            found = await self._find(call_id)
        if not hmac.compare_digest(found[1].client_sha256, _sha256(key)):
            raise _unknown(call_id)
        return found

    async def _find(self, call_id: str) -> tuple[int, RecordedCall]:
        if not IS_CALL.fullmatch(call_id):
            raise _unknown(call_id)
        try:
            message = await self.broker.next(self.names.traffic_stream, self.names.call(call_id, "*"), 1)
        except NotFound:
            raise _unknown(call_id) from None
        return message.sequence, decode_call(message.data, self.limits)


def _unknown(call_id: str) -> NotFound:
    return NotFound(
        f"id: {call_id[:100]!r} is no recorded call of this key: it was deleted, is older than "
        "explorer.traffic.keep_days, or its reply could not be trained (docs/agents.md)"
    )


def _sha256(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
