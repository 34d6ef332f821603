"""Between the contract's messages and an environment's own arguments and observations."""

import hashlib
import json
from typing import Any

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.sdk.contract import MAX_STATE_BYTES, json_object
from trinity.sdk.environment import Description, Observation
from trinity.sdk.errors import Broken, InvalidInput

_CHECKSUM_BYTES = 16


def described(description: Description) -> pb.EnvironmentDescription:
    return pb.EnvironmentDescription(
        name=description.name,
        summary=description.summary,
        max_parallel_episodes=description.max_parallel_episodes,
        step_timeout_seconds=description.step_timeout_seconds,
        reset_timeout_seconds=description.reset_timeout_seconds,
        deterministic=description.deterministic,
        snapshots=description.snapshots,
        images=description.images,
    )


def description_of(message: pb.EnvironmentDescription) -> Description:
    return Description(
        message.name,
        message.summary[:1000],
        message.max_parallel_episodes,
        message.step_timeout_seconds,
        message.reset_timeout_seconds or message.step_timeout_seconds,
        message.deterministic,
        message.snapshots,
        message.images,
    )


def reset_arguments(reset: pb.Reset) -> tuple[dict[str, Any], dict[str, Any], int]:
    """task, args and seed. Raises InvalidInput."""
    return parsed(reset.task_json, "reset.task_json"), parsed(reset.args_json, "reset.args_json"), reset.seed


def parsed(text: str, field: str) -> dict[str, Any]:
    """A JSON object. Raises InvalidInput."""
    try:
        return json_object(text)
    except ValueError as error:
        raise InvalidInput(field, str(error)) from None


def sealed(name: str, state: Any) -> bytes:
    """What the snapshot of environment `name` returned, for the wire: with a checksum. Raises Broken."""
    if not isinstance(state, bytes):
        raise Broken(f"its snapshot is {type(state).__name__}, must be bytes")
    if len(state) > MAX_STATE_BYTES - _CHECKSUM_BYTES:
        raise Broken(
            f"its snapshot has {len(state)} bytes, must have at most {MAX_STATE_BYTES - _CHECKSUM_BYTES}; where it is "
            'larger, return b"", and an interrupted episode continues at an earlier one'
        )
    return _checksum(name, state) + state if state else b""


def opened(name: str, sealed_state: bytes) -> bytes:
    """The bytes that the snapshot returned. Raises InvalidInput where they are not those of environment `name`."""
    checksum, state = sealed_state[:_CHECKSUM_BYTES], sealed_state[_CHECKSUM_BYTES:]
    if checksum != _checksum(name, state):
        raise InvalidInput("reset.state", f"is damaged, or no state of {name}")
    return state


def _checksum(name: str, state: bytes) -> bytes:
    return hashlib.blake2b(name.encode() + b"\0" + state, digest_size=_CHECKSUM_BYTES).digest()


def answer(observation: Any, turn: int, state: bytes = b"") -> pb.EpisodeResponse:
    """What an environment returned, as a message. `state`: sealed. Raises Broken if it is no observation."""
    if not isinstance(observation, Observation):
        raise Broken(f"it returned {type(observation).__name__}, must be an Observation")
    if not isinstance(observation.info, dict):
        raise Broken(f"the info of its observation is {type(observation.info).__name__}, must be a dict")
    try:
        return pb.EpisodeResponse(
            observation=observation.text,
            reward=observation.reward,
            done=bool(observation.done),
            info_json=json.dumps(observation.info) if observation.info else "",
            metrics=observation.metrics,
            turn=turn,
            state=state,
            images=observation.images,
        )
    except (TypeError, ValueError) as error:
        raise Broken(f"its observation cannot be sent: {error}") from None
