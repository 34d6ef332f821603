"""Between episodes and the protobuf messages of trinity/api/environment/v1."""

import grpc.aio

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.explorer.environments.types import Reset, Step
from trinity.runtime.messages import from_message, to_message
from trinity.sdk.contract import json_object

DESCRIBE = pb.DescribeRequest()


def stub_of(channel: grpc.aio.Channel) -> environment_pb2_grpc.EnvironmentServiceStub:
    return environment_pb2_grpc.EnvironmentServiceStub(channel)


def reset_request(reset: Reset) -> pb.EpisodeRequest:
    return pb.EpisodeRequest(reset=to_message(reset, pb.Reset))


def action_request(text: str, turn: int) -> pb.EpisodeRequest:
    return pb.EpisodeRequest(action=pb.Action(text=text, turn=turn))


def step_of(answer: pb.EpisodeResponse) -> Step:
    """Of an answer that keeps the contract."""
    return from_message(Step, answer, info=json_object(answer.info_json), metrics=dict(answer.metrics))
