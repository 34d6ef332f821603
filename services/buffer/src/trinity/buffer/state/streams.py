"""Specifies the streams of a run, and appends to the buffer's own streams past messages of other writers."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import structlog

from trinity.config.schema.explorer import TrafficConfig
from trinity.runtime.broker import Broker, SequenceConflict, StoredMessage, StreamSpec
from trinity.runtime.errors import DataLoss, NotFound
from trinity.runtime.names import RunNames

log = structlog.get_logger(__name__)

# The turns of unfinished episodes take at most this part of what the log may, and stay at most a day: the oldest go,
# and their episodes begin again. No explorer repeats a publish for longer.
TURNS, _TURNS_SECONDS, _TURNS_REPEATED_SECONDS = 0.125, 86400.0, 30.0
_SETTING = "TRINITY_BUFFER_LOG_GIB"
_BEHIND_SECONDS, _AGAIN_SECONDS = 3.0, 0.1
# Parts of what the log may take, for the other streams. Nothing of the ledger and of the dead letters ever goes by
# itself; queues and evaluations hold unfinished work.
_PARTS = {
    "tasks": 0.125, "evaluation_tasks": 0.125, "evaluations": 0.25, "batches": 0.5, "cursors": 0.125,
    "deadletters": 0.125,
}  # fmt: skip


class StoreCut(DataLoss):
    """NATS has lost acknowledged messages: what is left contradicts itself. Another start finds the same."""

    for_good = True


# Returns True for a message that a buffer of this run wrote.
IsOurs = Callable[[StoredMessage], Awaitable[bool]]


def stream_specs(names: RunNames, *, log_bytes: int, replicas: int, blobs_bytes: int = 0) -> list[StreamSpec]:
    """The streams that must exist on the broker. The log's dedupe window is longer than any retry of a publish.

    `blobs_bytes`: limit of the blobs, if larger than the log's.
    """
    log_spec = StreamSpec(
        names.experiences_stream,
        names.log_subjects,
        replicas=replicas,
        max_bytes=log_bytes,
        duplicate_window_seconds=1800.0,
        setting=_SETTING,
    )

    def sized(stream: str, kind: str) -> StreamSpec:
        size = int(_PARTS[kind] * log_bytes)
        return StreamSpec(stream, (names.subjects(kind),), replicas=replicas, max_bytes=size, setting=_SETTING)

    return [
        log_spec,
        sized(names.tasks_stream, "tasks"),
        sized(names.evaluation_tasks_stream, "evaluation_tasks"),
        sized(names.evaluations_stream, "evaluations"),
        sized(names.batches_stream, "batches"),
        sized(names.cursors_stream, "cursors"),
        sized(names.dead_letters_stream, "deadletters"),
        StreamSpec(
            names.blobs_stream,
            (names.subjects("blobs"),),
            replicas=replicas,
            max_bytes=max(log_bytes, blobs_bytes),
            setting=_SETTING,
        ),
        StreamSpec(
            names.turns_stream,
            (names.subjects("turns"),),
            replicas=replicas,
            max_bytes=int(TURNS * log_bytes),
            max_age_seconds=_TURNS_SECONDS,
            duplicate_window_seconds=_TURNS_REPEATED_SECONDS,
            setting=_SETTING,
        ),
    ]


def traffic_spec(names: RunNames, traffic: TrafficConfig, replicas: int) -> StreamSpec:
    """The stream of recorded calls and their rewards. A call goes before its reward, by age and by size."""
    return StreamSpec(
        names.traffic_stream,
        (names.subjects("traffic"),),
        replicas=replicas,
        max_bytes=traffic.keep_mib * 2**20,
        max_age_seconds=traffic.keep_days * 86400.0,
        setting="explorer.traffic.keep_mib",
    )


async def is_there(broker: Broker, stream: str, sequence: int) -> bool:
    """Returns False for a message that is still missing after a while: a replica may be behind."""
    deadline = time.monotonic() + _BEHIND_SECONDS
    while True:
        with contextlib.suppress(NotFound):
            await broker.get(stream, sequence)
            return True
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(_AGAIN_SECONDS)


async def newest_of_ours(broker: Broker, stream: str, is_ours: IsOurs) -> StoredMessage | None:
    """The newest message that a buffer of this run wrote; None if there is none. Others are stepped over."""
    state, passed = await broker.state(stream), 0
    for sequence in range(state.last_sequence, state.first_sequence - 1 if state.messages else state.last_sequence, -1):
        try:
            message = await broker.get(stream, sequence)
        except NotFound:
            continue
        if await is_ours(message):
            _say(stream, passed)
            return message
        passed += 1
    _say(stream, passed)
    return None


async def append_past_others(
    broker: Broker,
    subject: str,
    stream: str,
    data: Callable[[int], bytes],
    *,
    message_id: str,
    last_sequence: int,
    is_ours: IsOurs,
    is_same: IsOurs | None = None,
    headers: dict[str, str] | None = None,
) -> int:
    """Appends behind messages that other writers put into the stream; `data` is built for the sequence it gets.

    Raises SequenceConflict only if another buffer of this run wrote there, or this run stored this message id before:
    `is_same` judges the message with the id, or `is_ours` without an `is_same`.
    """
    name = message_id
    while True:
        try:
            return await broker.append(
                subject, stream, data(last_sequence + 1), message_id=name, last_sequence=last_sequence, headers=headers
            )
        except SequenceConflict as conflict:
            end = (await broker.state(stream)).last_sequence
            if end <= last_sequence and not conflict.stored_at:
                raise
            others = [conflict.stored_at] if conflict.stored_at else range(last_sequence + 1, end + 1)
            is_known = is_same if conflict.stored_at and is_same is not None else is_ours
            for sequence in others:
                if await _is_ours_at(broker, stream, sequence, is_known):
                    raise
            _say(stream, len(others))
            if conflict.stored_at:  # another process took this message id
                name = f"{message_id}/{end}"
            last_sequence = end


async def _is_ours_at(broker: Broker, stream: str, sequence: int, is_ours: IsOurs) -> bool:
    try:
        return await is_ours(await broker.get(stream, sequence))
    except NotFound:
        return False


def _say(stream: str, passed: int) -> None:
    if passed:
        log.warning("buffer.stream.skipped", stream=stream, messages=passed, advice="another process writes into it")
