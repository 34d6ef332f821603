"""Converts episodes to the messages of trinity/api/environment/v1 and back."""

import grpc.aio

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.explorer.environments.types import Step
from trinity.sdk.contract import Answer, Reset, json_object
from trinity.sdk.wire import reset_to_proto

DESCRIBE = pb.DescribeRequest()


def stub_of(channel: grpc.aio.Channel) -> environment_pb2_grpc.EnvironmentServiceStub:
    return environment_pb2_grpc.EnvironmentServiceStub(channel)


def reset_request(reset: Reset) -> pb.EpisodeRequest:
    return pb.EpisodeRequest(reset=reset_to_proto(reset))


def action_request(text: str, turn: int) -> pb.EpisodeRequest:
    return pb.EpisodeRequest(action=pb.Action(text=text, turn=turn))


def step_of(answer: Answer) -> Step:
    """The Step of an answer that keeps the contract."""
    return Step(
        answer.observation,
        answer.reward,
        answer.done,
        json_object(answer.info_json),
        dict(answer.metrics),
        answer.turn,
        answer.state,
        tuple(answer.images),
        answer.player,
        dict(answer.rewards),
    )
