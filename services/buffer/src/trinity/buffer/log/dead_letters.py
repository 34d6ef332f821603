"""Dead letters: tasks that were given up, with cause and attempts. A retried task lives again through the log."""

from collections.abc import Callable, Iterable

from trinity.api.common.v1 import experience_pb2
from trinity.buffer.shared import RunContext
from trinity.runtime.broker import StoredMessage
from trinity.runtime.errors import Conflict, NotFound


class DeadLetters:
    """The stream of dead letters: at most one for each task."""

    def __init__(self, context: RunContext, is_dead: Callable[[int], bool]) -> None:
        self._context = context
        self._stream = context.names.dead_letters_stream
        self._is_dead = is_dead

    async def show(self, limit: int, ordinal: int = 0) -> list[experience_pb2.AttemptFailure]:
        """Oldest first; of one task alone if an ordinal is given. NotFound if that has none."""
        if ordinal:
            return [_letter(await self._of(ordinal))]
        return [_letter(message) for message in await self._all(limit)]

    async def retry(self, ordinals: Iterable[int]) -> list[int]:
        """Feed these tasks again (all, if none is named). NotFound if one has no letter; then nothing happens."""
        messages = await self._asked(ordinals)
        letters = [_letter(message) for message in messages]
        for letter in letters:
            if not letter.task.task_id:
                raise Conflict(f"ordinals: nothing but the ordinal is known of task {letter.task.ordinal}; drop it")
        for message, letter in zip(messages, letters, strict=True):
            if self._is_dead(letter.task.ordinal):  # else an earlier call was cut off here
                await self._revive(letter)
            await self._context.broker.delete(self._stream, message.sequence)
        return [letter.task.ordinal for letter in letters]

    async def _revive(self, letter: experience_pb2.AttemptFailure) -> None:
        """Write into the log that the task lives again; the keeper and the feeder follow the log."""
        entry = experience_pb2.Outcome()
        entry.revival.task.CopyFrom(letter.task)
        entry.revival.task.life += 1
        task = entry.revival.task
        message_id = f"revival/{task.ordinal}/{task.life}"
        await self._context.broker.publish(
            self._context.names.control, entry.SerializeToString(), message_id=message_id
        )

    async def drop(self, ordinals: Iterable[int]) -> list[int]:
        """Take letters away (all, if none is named). NotFound as for retry."""
        messages = await self._asked(ordinals)
        for message in messages:
            await self._context.broker.delete(self._stream, message.sequence)
        return [_letter(message).task.ordinal for message in messages]

    async def _asked(self, ordinals: Iterable[int]) -> list[StoredMessage]:
        wanted = sorted(set(ordinals))
        return [await self._of(ordinal) for ordinal in wanted] if wanted else await self._all()

    async def _of(self, ordinal: int) -> StoredMessage:
        try:
            return await self._context.broker.last(self._stream, self._context.names.dead_letter(ordinal))
        except NotFound:
            raise NotFound(f"ordinals: task {ordinal} has no dead letter") from None

    async def _all(self, limit: int | None = None) -> list[StoredMessage]:
        found: list[StoredMessage] = []
        sequence = 1
        while limit is None or len(found) < limit:
            try:
                message = await self._context.broker.next(
                    self._stream, self._context.names.subjects("deadletters"), sequence
                )
            except NotFound:
                break
            found.append(message)
            sequence = message.sequence + 1
        return found


def _letter(message: StoredMessage) -> experience_pb2.AttemptFailure:
    return experience_pb2.AttemptFailure.FromString(message.data)
