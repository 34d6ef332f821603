"""The log of commands and the log of their results, streams on NATS.

The bodies of passes, which are large, are in a stream of their own. They are removed there once they are no longer
needed, so that the log of commands stays whole.

A command is appended at exactly the next place, so that every reader finds the same order, and under the message id of
its model and seq_id, so that a retry is one entry. Results are appended in the order of the commands. A result has the
sequence of its command in a header: an executor that starts again publishes no result twice.
"""

import contextlib
import hashlib
import json
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from trinity.runtime.broker import Broker, PublishRefused, StoredMessage, StreamSpec, ensure_streams, tail
from trinity.runtime.broker import Message as Delivered
from trinity.runtime.errors import DataLoss, NotFound
from trinity.runtime.names import RunNames
from trinity.tinker.commands import headers

_RETRIED_SECONDS = 1800.0
_APPEND_SECONDS = 20.0  # below a client's limit for a request
_MORE = 256
_SETTING = "log_gib"
SAMPLED = "sampler_weights"  # in paths of adapters to sample by


class Kind(StrEnum):
    """Kinds of commands. REFUSED stands for a refused command: it does nothing and uses its seq_id up."""

    SESSION = "session"
    DELETE = "delete"  # of a named save: `model` is its path
    END = "end"  # of a session: its models go, its states stay
    CREATE_MODEL = "create_model"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_WEIGHTS = "save_weights"
    LOAD_WEIGHTS = "load_weights"
    SAVE_SAMPLER = "save_sampler"  # adapters to sample by
    SAMPLER = "sampler"  # a sampling session: `model` is its id
    REFUSED = "refused"


@dataclass(frozen=True)
class Apart:
    """A body in the stream of passes. `size`: bytes. `digest`: as that of the command."""

    sequence: int
    size: int
    digest: bytes


@dataclass(frozen=True)
class Command:
    """An entry. `body` is the client's request in canonical form; `model` a model id, or a session's. `position`: its
    sequence in the stream; 0 before it is stored. `time`: when it was accepted, seconds since 1970. `apart`: where the
    body is, if it is not in the entry; a reader that does not execute the command leaves it there."""

    kind: Kind
    tenant: str
    model: str
    seq_id: int
    body: bytes
    time: float
    position: int = 0
    apart: Apart | None = None

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return len(self.body) if self.apart is None else self.apart.size

    @property
    def digest(self) -> bytes:
        """SHA-256, equal for a command and its retry.

        The official client gives the sampling session another number when it retries a save without a name.
        """
        if self.apart is not None:
            return self.apart.digest
        body = self.body
        if self.kind is Kind.SAVE_SAMPLER and self.values["path"] is None:
            body = canonical(self.values | {"sampling_session_seq_id": None})
        return hashlib.sha256(self.kind.encode() + b"\0" + body).digest()

    @property
    def request_id(self) -> str:
        return f"{self.model}:{self.seq_id}"

    @property
    def values(self) -> dict[str, Any]:
        """The body, of a kind whose body is JSON."""
        found: dict[str, Any] = json.loads(self.body)
        return found


@dataclass(frozen=True)
class Result:
    """A command's result, with a protobuf body for forward_backward and a JSON body for other kinds and `failed`.

    `seconds`: of the device that the command took. Equal results may have taken others.
    """

    request_id: str
    kind: str
    body: bytes
    position: int
    seconds: float = field(default=0.0, compare=False)

    FAILED = "failed"


@dataclass(frozen=True)
class Told:
    """A result in the stream, without its body. `position`: of its command."""

    sequence: int
    request_id: str
    tenant: str
    position: int
    seconds: float
    failed: bool


def model_id_of(session_id: str, number: int) -> str:
    """Returns the id of a session's model, as the client makes it too."""
    return f"{session_id}:train:{number}"


def sampler_id_of(session_id: str, number: int) -> str:
    """Returns the id of a sampling session of a session."""
    return f"{session_id}:sample:{number}"


def session_of(name: str) -> str:
    """Returns the session of a model's id, or of a sampling session's."""
    return name.partition(":")[0]


def is_of(session_id: str, model_id: str) -> bool:
    """Returns True for a model of the session."""
    return model_id.rpartition(":train:")[0] == session_id


def sampler_path_of(model_id: str, values: Mapping[str, Any]) -> str:
    """Returns the path of the adapters that a SAVE_SAMPLER command saves. Without a name they belong to the sampling
    session that the command makes; `@` is in no name of a client."""
    name = values["path"] if values["path"] is not None else f"@{values['sampling_session_seq_id']}"
    return f"tinker://{model_id}/{SAMPLED}/{name}"


def state_path_of(model_id: str, name: str) -> str:
    """Returns the path of a state that a SAVE_WEIGHTS command saves."""
    return f"tinker://{model_id}/weights/{name}"


def canonical(values: dict[str, Any]) -> bytes:
    """Writes JSON that is equal for equal requests."""
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def failed(request_id: str, problem: str, position: int, *, by_user: bool) -> Result:
    """Returns the result of a command that could not be executed."""
    body = canonical({"error": problem, "category": "user" if by_user else "server"})
    return Result(request_id, Result.FAILED, body, position)


def stream_specs(names: RunNames, log_bytes: int, kept_seconds: float) -> list[StreamSpec]:
    """Commands stay until the log is full, which refuses further ones; results stay for `kept_seconds`."""
    commands, passes = (
        StreamSpec(
            name, (names.subjects(kind),), max_bytes=log_bytes, replicas=0, duplicate_window_seconds=_RETRIED_SECONDS,
            setting=_SETTING,
        )
        for name, kind in ((names.commands_stream, "commands"), (names.passes_stream, "passes"))
    )  # fmt: skip
    results = StreamSpec(
        names.results_stream, (names.subjects("results"),), max_bytes=log_bytes, replicas=0,
        max_age_seconds=kept_seconds, duplicate_window_seconds=min(_RETRIED_SECONDS, kept_seconds), setting=_SETTING,
    )  # fmt: skip
    return [commands, passes, results]


def _no_room(problem: str) -> None:
    raise PublishRefused(f"the log of commands is full ({problem}); raise {_SETTING}, or serve under another name")


class CommandLog:
    """The streams of one run."""

    def __init__(self, broker: Broker, names: RunNames) -> None:
        self._broker = broker
        self._names = names
        self._kept_bytes = 0
        self._followed: deque[tuple[int, int]] = deque()  # positions of passes, and the sequences of their bodies

    async def open(self, log_bytes: int, kept_seconds: float) -> None:
        """Makes the streams if they are missing. Raises Conflict or Full as ensure_streams does."""
        await ensure_streams(self._broker, stream_specs(self._names, log_bytes, kept_seconds))
        self._kept_bytes = log_bytes // 2

    async def append(self, command: Command, after: int) -> int:
        """Stores a command right behind the sequence `after`; returns its own once it is durable.

        Raises SequenceConflict if another entry is there, PublishRefused if the log is full, Unavailable.
        """
        subject, stream, body = self._names.command(command.model), self._names.commands_stream, command.body
        about = {
            headers.KIND: command.kind, headers.TENANT: command.tenant, headers.MODEL: command.model,
            headers.SEQ_ID: str(command.seq_id), headers.TIME: repr(command.time),
        }  # fmt: skip
        limits: dict[str, Any] = {"deadline_seconds": _APPEND_SECONDS, "on_refused": _no_room}
        if command.kind is Kind.FORWARD_BACKWARD:
            place, once = self._names.body_of_pass(command.model), uuid.uuid4().hex
            stored = await self._broker.publish(place, body, message_id=once, **limits)
            about[headers.PASS], body = f"{stored.sequence} {len(body)} {command.digest.hex()}", b""
        return await self._broker.append(
            subject, stream, body, message_id=command.request_id, last_sequence=after, headers=about, **limits
        )

    async def last_command(self) -> int:
        """The sequence of the newest command; 0 without any."""
        return (await self._broker.state(self._names.commands_stream)).last_sequence

    async def commands(self, after: int, through: int) -> AsyncIterator[Command]:
        """Yields the commands above `after` up to `through`, in order. Raises DataLoss if one is missing."""
        expected = after + 1
        while expected <= through:
            found = await self._several(self._names.commands_stream, expected)
            for message in found:
                if message.sequence != expected:
                    break
                yield _command(message)
                expected += 1
                if expected > through:
                    return
            if not found or found[0].sequence > expected:
                raise DataLoss(
                    f"{self._names.commands_stream} has no command {expected}: messages were removed by hand"
                )

    async def _several(self, stream: str, expected: int) -> list[StoredMessage]:
        """Returns the next messages of a stream; none only if the expected one is not there."""
        found = await self._broker.several(stream, expected, _MORE)
        if not found:
            with contextlib.suppress(NotFound):
                found = [await self._broker.get(stream, expected)]
        return found

    async def follow(self, after: int) -> AsyncIterator[Command]:
        """Yields every command above `after`, in order, for ever, with its body. Raises Gap if one is missing, DataLoss
        if a body is."""
        async for message in tail(self._broker, self._names.commands_stream, after):
            command = _command(message)
            if command.apart is not None:
                self._followed.append((command.position, command.apart.sequence))
                try:
                    body = (await self._broker.get(self._names.passes_stream, command.apart.sequence)).data
                except NotFound:
                    raise DataLoss(f"the body of command {command.position} is no longer kept") from None
                command = replace(command, body=body)
            yield command

    async def release(self, position: int) -> None:
        """Removes the bodies of passes up to a command that was followed, if they fill half of their stream."""
        stream, released = self._names.passes_stream, [one for one in self._followed if one[0] <= position]
        if not released or (await self._broker.state(stream)).bytes < self._kept_bytes:
            return
        await self._broker.purge_below(stream, released[-1][1] + 1)
        for _ in released:
            self._followed.popleft()

    async def told(self, after: int) -> tuple[int, dict[int, Told]]:
        """Returns the sequence of the newest result, and those above `after` that are kept, by their commands'
        positions."""
        stream, found = self._names.results_stream, dict[int, Told]()
        state = await self._broker.state(stream)
        expected = max(after + 1, state.first_sequence)
        while expected <= state.last_sequence and state.messages:
            several = await self._several(stream, expected)
            found |= {told.position: told for told in map(_told, several)}
            expected = several[-1].sequence + 1 if several else expected + 1
        return state.last_sequence, found

    async def kept_results(self) -> tuple[int, int]:
        """Returns the sequences of the oldest and the newest result; the newest is smaller if none is kept."""
        state = await self._broker.state(self._names.results_stream)
        return state.first_sequence, state.last_sequence if state.messages else state.first_sequence - 1

    async def add_result(self, result: Result, command: Command, after: int) -> int:
        """Stores a result right behind the sequence `after`. Raises SequenceConflict if another executor did."""
        about = {
            headers.REQUEST: result.request_id, headers.KIND: result.kind, headers.POSITION: str(result.position),
            headers.TENANT: command.tenant, headers.SECONDS: repr(result.seconds),
        }  # fmt: skip
        subject, stream = self._names.result(command.model), self._names.results_stream
        return await self._broker.append(
            subject, stream, result.body, message_id=result.request_id, last_sequence=after, headers=about
        )

    async def results(self, after: int) -> AsyncIterator[Told]:
        """Yields every result above `after`, for ever."""
        async for message in tail(self._broker, self._names.results_stream, after):
            yield _told(message)

    async def result(self, sequence: int) -> Result:
        """Raises NotFound for a result that is no longer kept."""
        return _result(await self._broker.get(self._names.results_stream, sequence))


def now() -> float:
    return round(time.time(), 3)


def _command(message: StoredMessage | Delivered) -> Command:
    values = {name: _header(message, name) for name in (headers.TENANT, headers.MODEL)}
    try:
        kind, seq_id = Kind(_header(message, headers.KIND)), int(_header(message, headers.SEQ_ID))
        at = float(_header(message, headers.TIME))
    except ValueError as error:
        raise DataLoss(f"command {message.sequence} has unreadable headers: {error}") from None
    tenant, model = values[headers.TENANT], values[headers.MODEL]
    return Command(kind, tenant, model, seq_id, message.data, at, message.sequence, _apart(message))


def _apart(message: StoredMessage | Delivered) -> Apart | None:
    if (found := message.headers.get(headers.PASS)) is None:
        return None
    try:
        sequence, size, digest = found.split()
        return Apart(int(sequence), int(size), bytes.fromhex(digest))
    except ValueError as error:
        raise DataLoss(f"command {message.sequence} has an unreadable header {headers.PASS}: {error}") from None


def _result(message: StoredMessage) -> Result:
    told = _told(message)
    return Result(told.request_id, _header(message, headers.KIND), message.data, told.position, told.seconds)


def _told(message: StoredMessage | Delivered) -> Told:
    request_id, tenant = _header(message, headers.REQUEST), _header(message, headers.TENANT)
    position, seconds = int(_header(message, headers.POSITION)), float(_header(message, headers.SECONDS))
    failed = _header(message, headers.KIND) == Result.FAILED
    return Told(message.sequence, request_id, tenant, position, seconds, failed)


def _header(message: StoredMessage | Delivered, name: str) -> str:
    found = message.headers.get(name)
    if found is None:
        raise DataLoss(f"message {message.sequence} has no header {name}; another program wrote it")
    return found
