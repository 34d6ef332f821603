"""Converts episodes to the messages of trinity/api/environment/v1 and back."""

import grpc.aio

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.sdk.contract import Reset
from trinity.sdk.wire import reset_to_proto

DESCRIBE = pb.DescribeRequest()


def stub_of(channel: grpc.aio.Channel) -> environment_pb2_grpc.EnvironmentServiceStub:
    return environment_pb2_grpc.EnvironmentServiceStub(channel)


def reset_request(reset: Reset) -> pb.EpisodeRequest:
    return pb.EpisodeRequest(reset=reset_to_proto(reset))


def action_request(text: str, turn: int) -> pb.EpisodeRequest:
    return pb.EpisodeRequest(action=pb.Action(text=text, turn=turn))
