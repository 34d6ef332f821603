"""Between turns and their protobuf messages. Decoding checks what it reads (invariant I8)."""

import json

from google.protobuf.message import DecodeError

from trinity.api.common.v1 import experience_pb2
from trinity.api.environment.v1 import environment_pb2
from trinity.data.experience import Limits, VersionSpan
from trinity.data.wire import fill_tensor, from_tensor
from trinity.explorer.environments.episode import Step, step_of
from trinity.explorer.journal.turns import RecordedTurn
from trinity.explorer.types import Completion
from trinity.runtime.errors import FailureCause, InvalidInput
from trinity.sdk.contract import answer_problem


def encode_turn(turn: RecordedTurn) -> bytes:
    """An entry of the stream of turns."""
    entry, made = experience_pb2.TurnEntry(), turn.completion
    message = entry.turn
    message.episode, message.turn, message.seen = turn.episode, turn.turn, turn.seen
    message.begin = turn.begin
    fill_tensor(message.token_ids, made.token_ids)
    fill_tensor(message.logprobs, made.logprobs)
    for span in made.version_spans:
        message.version_spans.add(version=span.version, start=span.start, end=span.end)
    message.finish_reason = made.finish_reason
    if turn.answer is not None:
        message.answer.CopyFrom(_encoded(turn.answer))
    return entry.SerializeToString()


def encode_abandoned(cause: FailureCause) -> bytes:
    """The entry of an attempt that failed."""
    return experience_pb2.TurnEntry(abandoned=experience_pb2.Abandoned(cause=cause)).SerializeToString()


def decode_entry(data: bytes, limits: Limits) -> RecordedTurn | None:
    """A turn, checked; None for an attempt that failed. Raises InvalidInput."""
    try:
        entry = experience_pb2.TurnEntry.FromString(data)
    except DecodeError as error:
        raise InvalidInput("turn", f"is no trinity.api.common.v1.TurnEntry: {error}") from None
    kind = entry.WhichOneof("entry")
    if kind == "abandoned":
        return None
    if kind != "turn":
        raise InvalidInput("turn", "is empty, must hold a turn or the end of an attempt")
    message = entry.turn
    completion = Completion(
        from_tensor(message.token_ids, "turn.token_ids", "int32"),
        from_tensor(message.logprobs, "turn.logprobs", "float32"),
        tuple(VersionSpan(span.version, span.start, span.end) for span in message.version_spans),
        message.finish_reason,
    )
    answer = _decoded(message.answer) if message.HasField("answer") else None
    turn = RecordedTurn(message.episode, message.turn, message.seen, completion, message.begin, answer)
    turn.check(limits)
    return turn


def _encoded(answer: Step) -> environment_pb2.EpisodeResponse:
    return environment_pb2.EpisodeResponse(
        observation=answer.observation,
        reward=answer.reward,
        info_json=json.dumps(answer.info) if answer.info else "",
        metrics=answer.metrics,
        turn=answer.turn,
        state=answer.state,
        images=answer.images,
    )


def _decoded(message: environment_pb2.EpisodeResponse) -> Step:
    """Raises InvalidInput for an answer that no provider may give, or that no reply follows."""
    problem = "it has a turn below 0" if message.turn < 0 else "it is done" if message.done else ""
    if problem := problem or answer_problem(message, message.turn, images=True):
        raise InvalidInput("turn.answer", f"cannot be right: {problem}")
    return step_of(message)
