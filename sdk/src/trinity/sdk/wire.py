"""Protobuf messages of the contract as dataclasses, and an environment's arguments and observations."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.numbers import real_number
from trinity.sdk.contract import (
    MAX_STATE_BYTES,
    Action,
    Answer,
    Call,
    Close,
    Failure,
    Offer,
    Reply,
    Reset,
    Response,
    Score,
    ScoreRequest,
    json_object,
    sendable,
)
from trinity.sdk.environment import Description, Observation
from trinity.sdk.errors import Broken, InvalidInput

_CHECKSUM_BYTES = 16

# Messages that other modules pass on without reading them.
CallMessage = pb.ProviderCall
ReplyMessage = pb.ProviderReply

_Kind = TypeVar("_Kind")


def _made(kind: type[_Kind], message: Message, **others: Any) -> _Kind:
    """Makes a dataclass of a message with the same fields; `others` are those of another type or value."""
    found = {field.name: getattr(message, field.name) for field in fields(kind) if field.name not in others}  # type: ignore[arg-type]
    return kind(**found, **others)


def described(description: Description) -> pb.EnvironmentDescription:
    return pb.EnvironmentDescription(**vars(description))


def description_of(message: pb.EnvironmentDescription) -> Description:
    return _made(
        Description,
        message,
        summary=message.summary[:1000],
        reset_timeout_seconds=message.reset_timeout_seconds or message.step_timeout_seconds,
        players=tuple(message.players),
    )


def reset_to_proto(reset: Reset) -> pb.Reset:
    return pb.Reset(**vars(reset))


def reset_from_proto(message: pb.Reset) -> Reset:
    return _made(Reset, message)


def action_to_proto(action: Action) -> pb.Action:
    return pb.Action(text=action.text, turn=action.turn)


def action_from_proto(message: pb.Action) -> Action:
    return Action(message.text, message.turn)


def answer_to_proto(answer: Answer) -> pb.EpisodeResponse:
    return pb.EpisodeResponse(**vars(answer))


def answer_from_proto(message: pb.EpisodeResponse) -> Answer:
    metrics, images, rewards = dict(message.metrics), tuple(message.images), dict(message.rewards)
    return _made(Answer, message, metrics=metrics, images=images, rewards=rewards)


def score_request_to_proto(request: ScoreRequest) -> pb.ScoreRequest:
    items = [pb.ScoreItem(**vars(item)) for item in request.items]
    return pb.ScoreRequest(
        scorer=request.scorer, items=items, args_json=request.args_json, reward_bound=request.reward_bound
    )


def score_request_from_proto(message: pb.ScoreRequest) -> ScoreRequest:
    items = [_made(Response, item, response_token_ids=tuple(item.response_token_ids)) for item in message.items]
    return ScoreRequest(message.scorer, items, message.args_json, message.reward_bound)


def scores_to_proto(scores: Iterable[Score]) -> pb.ScoreResponse:
    return pb.ScoreResponse(scores=[pb.Score(**vars(score)) for score in scores])


def scores_from_proto(message: pb.ScoreResponse) -> list[Score]:
    return [Score(score.reward, dict(score.metrics), score.error) for score in message.scores]


def call_to_proto(call: Call) -> pb.ProviderCall:
    match call.message:
        case Action() as action:
            return pb.ProviderCall(id=call.id, action=action_to_proto(action))
        case Reset() as reset:
            return pb.ProviderCall(id=call.id, reset=reset_to_proto(reset))
        case ScoreRequest() as request:
            return pb.ProviderCall(id=call.id, score=score_request_to_proto(request))
    return pb.ProviderCall(id=call.id, close=pb.Close())


def call_from_proto(message: pb.ProviderCall) -> Call:
    match message.WhichOneof("call"):
        case "action":
            return Call(message.id, action_from_proto(message.action))
        case "reset":
            return Call(message.id, reset_from_proto(message.reset))
        case "score":
            return Call(message.id, score_request_from_proto(message.score))
        case "close":
            return Call(message.id, Close())
    return Call(message.id, None)


def reply_to_proto(reply: Reply) -> pb.ProviderReply:
    match reply.result:
        case None:
            return pb.ProviderReply(id=reply.id)
        case Answer() as answer:
            return pb.ProviderReply(id=reply.id, response=answer_to_proto(answer))
        case Failure(code, text):
            return pb.ProviderReply(id=reply.id, failure=pb.Failure(code=code, message=text))
    return pb.ProviderReply(id=reply.id, scores=scores_to_proto(reply.result))


def reply_from_proto(message: pb.ProviderReply) -> Reply:
    match message.WhichOneof("reply"):
        case "response":
            return Reply(message.id, answer_from_proto(message.response))
        case "failure":
            return Reply(message.id, Failure(message.failure.code, message.failure.message))
        case "scores":
            return Reply(message.id, scores_from_proto(message.scores))
    return Reply(message.id, None)


def encode_call(call: Call) -> bytes:
    return call_to_proto(call).SerializeToString()


def decode_call(data: bytes) -> Call:
    return call_from_proto(pb.ProviderCall.FromString(data))


def encode_reply(reply: Reply) -> bytes:
    return reply_to_proto(reply).SerializeToString()


def decode_reply(data: bytes) -> Reply:
    return reply_from_proto(pb.ProviderReply.FromString(data))


def offer_to_proto(offer: Offer) -> pb.Offer:
    return pb.Offer(**vars(offer) | {"environments": [described(one) for one in offer.environments]})


def offer_from_proto(message: pb.Offer) -> Offer:
    environments = [description_of(one) for one in message.environments]
    return _made(Offer, message, environments=environments, scorers=list(message.scorers))


def reset_arguments(reset: Reset) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Returns task, args and seed. Raises InvalidInput."""
    return parsed(reset.task_json, "reset.task_json"), parsed(reset.args_json, "reset.args_json"), reset.seed


def parsed(text: str, field: str) -> dict[str, Any]:
    """Parses a JSON object. Raises InvalidInput naming the field."""
    try:
        return json_object(text)
    except ValueError as error:
        raise InvalidInput(field, str(error)) from None


def sealed(name: str, state: Any) -> bytes:
    """Adds a checksum to a snapshot of environment `name`. Raises Broken for a snapshot that cannot be sent."""
    if not isinstance(state, bytes):
        raise Broken(f"its snapshot is {type(state).__name__}, must be bytes")
    if len(state) > MAX_STATE_BYTES - _CHECKSUM_BYTES:
        raise Broken(
            f"its snapshot has {len(state)} bytes, must have at most {MAX_STATE_BYTES - _CHECKSUM_BYTES}; where it is "
            'larger, return b"", and an interrupted episode continues at an earlier one'
        )
    return _checksum(name, state) + state if state else b""


def opened(name: str, sealed_state: bytes) -> bytes:
    """Returns the bytes of the snapshot. Raises InvalidInput unless the checksum is that of environment `name`."""
    checksum, state = sealed_state[:_CHECKSUM_BYTES], sealed_state[_CHECKSUM_BYTES:]
    if checksum != _checksum(name, state):
        raise InvalidInput("reset.state", f"is damaged, or no state of {name}")
    return state


def _checksum(name: str, state: bytes) -> bytes:
    return hashlib.blake2b(name.encode() + b"\0" + state, digest_size=_CHECKSUM_BYTES).digest()


def answer(observation: Any, turn: int, state: bytes = b"") -> Answer:
    """Makes the answer of an observation. `state`: sealed. Raises Broken for another type."""
    if not isinstance(observation, Observation):
        raise Broken(f"it returned {type(observation).__name__}, must be an Observation")
    if not isinstance(observation.info, dict):
        raise Broken(f"the info of its observation is {type(observation.info).__name__}, must be a dict")
    if not isinstance(observation.text, str):
        raise Broken(f"the text of its observation is {type(observation.text).__name__}, must be a str")
    if observation.done not in (True, False):
        raise Broken(f"the done of its observation is {observation.done!r:.40}, must be True or False")
    if not isinstance(observation.images, Sequence):
        raise Broken(f"the images of its observation are {observation.images!r:.40}, must be a list of bytes")
    for name in ("metrics", "rewards"):
        if not isinstance(getattr(observation, name), Mapping):
            raise Broken(f"the {name} of its observation are {getattr(observation, name)!r:.40}, must be a dict")
    try:
        metrics = {
            str(name): real_number(value, f"metrics.{name}") for name, value in dict(observation.metrics).items()
        }
        rewards = {
            str(name): real_number(value, f"rewards.{name}") for name, value in dict(observation.rewards).items()
        }
        message = pb.EpisodeResponse(  # checks the types of what the environment's author gave
            observation=sendable(observation.text),
            reward=real_number(observation.reward, "reward"),
            done=bool(observation.done),
            info_json=json.dumps(observation.info) if observation.info else "",
            metrics=metrics,
            turn=turn,
            state=state,
            images=observation.images,
            player=observation.player,
            rewards=rewards,
        )
    except (TypeError, ValueError, InvalidInput) as error:
        raise Broken(f"its observation cannot be sent: {error}") from None
    return _made(Answer, message, metrics=metrics, images=tuple(observation.images), rewards=rewards)
