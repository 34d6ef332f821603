"""Dead letters: tasks that failed all their attempts, with the cause. A retried task is requeued through the log."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable

from trinity.buffer.log.wire import Letter
from trinity.buffer.state.context import RunContext
from trinity.runtime.broker import StoredMessage, new_message_id, on_subject
from trinity.runtime.errors import Conflict, NotFound
from trinity.runtime.names import RunNames

_READ_AHEAD = 256
_DELETED_AT_ONCE = 64
_Found = tuple[StoredMessage, Letter]
_Change = Callable[[list[_Found]], Awaitable[list[int]]]


class DeadLetters:
    """The stream of dead letters: at most one for each task."""

    def __init__(self, context: RunContext, is_dead: Callable[[int], bool], left: Callable[[], int]) -> None:
        self._context = context
        self._stream = context.names.dead_letters_stream
        self._is_dead = is_dead
        self._left = left
        self._reading, self._changing = asyncio.Lock(), asyncio.Lock()
        self._next: asyncio.Task[list[_Found]] | None = None  # a read that has not begun
        self._most = 0.0  # letters that the callers of that read ask for
        self._changes: dict[_Change, asyncio.Task[list[int]]] = {}  # of all letters, that have not begun

    async def show(self, limit: int, ordinal: int = 0) -> list[Letter]:
        """Oldest first, without images; with an ordinal only that task's. Raises NotFound if the task has no letter."""
        found = [await self._of(ordinal)] if ordinal else (await self._all(limit))[:limit]
        # A task has up to 6 MiB of images, and a message of many letters must stay below rpc.MAX_MESSAGE_BYTES.
        return [letter.without_images() for _, letter in found]

    async def retry(self, ordinals: Iterable[int]) -> list[int]:
        """Feed these tasks again (all, if none is named), each in the place of a new one.

        NotFound if one has no letter, Conflict if the run feeds fewer tasks until its end; then nothing happens.
        """
        return await self._change(self._retry, ordinals)

    async def drop(self, ordinals: Iterable[int]) -> list[int]:
        """Take letters away (all, if none is named). NotFound as for retry."""
        return await self._change(self._drop, ordinals)

    async def _change(self, change: _Change, ordinals: Iterable[int]) -> list[int]:
        """One change at a time: a second caller finds the letters gone, and takes none twice."""
        if wanted := sorted(set(ordinals)):
            async with self._changing:
                return await change([await self._of(ordinal) for ordinal in wanted])
        if change not in self._changes:
            self._changes[change] = asyncio.create_task(self._change_all(change))
        return await asyncio.shield(self._changes[change])  # as with a read, a caller that leaves does not end it

    async def _change_all(self, change: _Change) -> list[int]:
        """For all callers that ask for this change before it begins."""
        async with self._changing:
            del self._changes[change]
            return await change(await self._all())

    async def _retry(self, found: list[_Found]) -> list[int]:
        if len(found) > (left := self._left()):
            raise Conflict(
                f"ordinals: {len(found)} tasks cannot be fed again, the run feeds {left} more until its last step; "
                "name fewer, or give the run more steps (buffer.total_steps)"
            )
        for _, letter in found:
            if not letter.fields.task.task_id:
                raise Conflict(f"ordinals: nothing but the ordinal is known of task {letter.ordinal}; drop it")
        for message, letter in found:
            if self._is_dead(letter.ordinal):  # else an earlier call was cut off here
                await self._requeue(letter)
            await self._context.broker.delete(self._stream, message.sequence)
        return [letter.ordinal for _, letter in found]

    async def _requeue(self, letter: Letter) -> None:
        """Write into the log that the task is fed again; the ledger's writer and the feeder follow the log."""
        entry = letter.requeue()
        await self._context.broker.publish(self._context.names.control, entry, message_id=new_message_id())

    async def _drop(self, found: list[_Found]) -> list[int]:
        for first in range(0, len(found), _DELETED_AT_ONCE):
            some = found[first : first + _DELETED_AT_ONCE]
            await asyncio.gather(*(self._context.broker.delete(self._stream, m.sequence) for m, _ in some))
        return [letter.ordinal for _, letter in found]

    async def _of(self, ordinal: int) -> _Found:
        found = await self._read(self._context.names.dead_letter(ordinal))
        if not found:
            raise NotFound(f"ordinals: task {ordinal} has no dead letter")
        return found[-1]

    async def _all(self, limit: float = math.inf) -> list[_Found]:
        """At least the oldest `limit`, by one read for all who ask before it begins."""
        self._most = max(self._most, limit)
        if self._next is None:
            self._next = asyncio.create_task(self._read_in_turn())
        return await asyncio.shield(self._next)  # a caller that leaves does not end the read of the others

    async def _read_in_turn(self) -> list[_Found]:
        async with self._reading:
            most, self._most, self._next = self._most, 0.0, None
            return await self._read(self._context.names.subjects("deadletters"), most)

    async def _read(self, subject: str, most: float = math.inf) -> list[_Found]:
        """Reads the letters of a subject and skips other messages."""
        found: list[_Found] = []
        async for message in on_subject(self._context.broker, self._stream, subject, read_ahead=_READ_AHEAD):
            if (letter := letter_in(self._context.names, message)) is not None:
                found.append((message, letter))
            if len(found) >= most:
                break
        return found


def letter_in(names: RunNames, message: StoredMessage) -> Letter | None:
    """The dead letter in a message; None if it holds none of its subject's task."""
    letter = Letter.parse(message.data)
    return letter if letter is not None and message.subject == names.dead_letter(letter.ordinal) else None
