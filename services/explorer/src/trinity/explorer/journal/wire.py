"""Converts turns to protobuf messages and back. Decoding validates them (invariant I8)."""

from google.protobuf.message import DecodeError

from trinity.api.common.v1 import experience_pb2
from trinity.api.environment.v1 import environment_pb2
from trinity.data.experience import Limits
from trinity.data.wire import from_tensor, to_tensor
from trinity.explorer.journal.turns import RecordedAnswer, RecordedTurn
from trinity.explorer.types import Completion
from trinity.runtime.errors import FailureCause, InvalidInput
from trinity.runtime.messages import from_message, to_message
from trinity.sdk.contract import Answer, answer_problem
from trinity.sdk.environment import Description
from trinity.sdk.wire import answer_from_proto, answer_to_proto


def encode_turn(turn: RecordedTurn) -> bytes:
    """An entry of the stream of turns."""
    made = turn.completion
    message = to_message(
        turn,
        experience_pb2.RecordedTurn,
        completion=None,
        token_ids=to_tensor(made.token_ids),
        logprobs=to_tensor(made.logprobs),
        version_spans=[to_message(span, experience_pb2.VersionSpan) for span in made.version_spans],
        finish_reason=made.finish_reason,
        answer=answer_to_proto(turn.answer) if turn.answer is not None else None,
    )
    return experience_pb2.TurnEntry(turn=message).SerializeToString()


def encode_answer(answered: RecordedAnswer) -> bytes:
    """The entry of an answer to a turn's reply."""
    message = to_message(answered, experience_pb2.RecordedAnswer, answer=answer_to_proto(answered.answer))
    return experience_pb2.TurnEntry(answered=message).SerializeToString()


def encode_abandoned(cause: FailureCause) -> bytes:
    """The last entry of an attempt that failed or returned its lease (RETURNED)."""
    return experience_pb2.TurnEntry(abandoned=experience_pb2.Abandoned(cause=cause)).SerializeToString()


def decode_entry(data: bytes, limits: Limits) -> RecordedTurn | RecordedAnswer | str:
    """A valid turn, the answer to one, or the cause of an attempt's end. Raises InvalidInput."""
    try:
        entry = experience_pb2.TurnEntry.FromString(data)
    except DecodeError as error:
        raise InvalidInput("turn", f"is no trinity.api.common.v1.TurnEntry: {error}") from None
    kind = entry.WhichOneof("entry")
    if kind == "abandoned":
        return entry.abandoned.cause
    if kind == "answered":
        answered = from_message(RecordedAnswer, entry.answered, answer=_decoded(entry.answered.answer))
        answered.check()
        return answered
    if kind != "turn":
        raise InvalidInput("turn", "is empty, must hold a turn, an answer or the end of an attempt")
    message = entry.turn
    completion = from_message(
        Completion,
        message,
        token_ids=from_tensor(message.token_ids, "turn.token_ids", "int32"),
        logprobs=from_tensor(message.logprobs, "turn.logprobs", "float32"),
    )
    answer = _decoded(message.answer) if message.HasField("answer") else None
    if answer is not None and answer.done:
        raise InvalidInput("turn.answer", "cannot be right: it is done, and a reply follows it")
    turn = from_message(RecordedTurn, message, completion=completion, answer=answer)
    turn.check(limits)
    return turn


def _decoded(message: environment_pb2.EpisodeResponse) -> Answer:
    """Raises InvalidInput if an answer breaks the contract."""
    answer = answer_from_proto(message)
    problem = "it has a turn below 0" if message.turn < 0 else ""
    if problem := problem or answer_problem(answer, answer.turn, Description("", images=True)):
        raise InvalidInput("turn.answer", f"cannot be right: {problem}")
    return answer
