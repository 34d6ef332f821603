"""A provider of environments that does what the name of the environment says: well, or against the contract."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from trinity.api.environment.v1 import environment_pb2 as pb
from trinity.api.environment.v1 import environment_pb2_grpc
from trinity.runtime import rpc
from trinity.sdk.contract import PROTOCOL_VERSION

LIES = {
    "nan": {"reward": float("nan")},
    "infinite": {"reward": float("inf")},
    "huge": {"observation": "x" * 1_100_000},
    "order": {"turn": 7},
    "garbage": {"info_json": "{"},
    "list": {"info_json": "[1]"},
    "nan_metric": {"metrics": {"steps": float("nan")}},
    "beyond": {"reward": -2e6},
    "adding": {"reward": 6e5},
    "long_name": {"metrics": {"n" * 10_000: 1.0}},
    "wide_metric": {"metrics": {"steps": 1e300}},
    "many_metrics": {"metrics": {str(index): 1.0 for index in range(101)}},
}

SCORES = {
    "beyond": {"reward": 1.1e6},
    "long_name": {"metrics": {"n" * 10_000: 1.0}},
    "wide_metric": {"metrics": {"x": -1e39}},
    "many_metrics": {"metrics": {str(index): 1.0 for index in range(901)}},
}


class ScriptedProvider(environment_pb2_grpc.EnvironmentServiceServicer):
    """`good` counts to three and is done. Others behave until the first action. `slots`: of all names; 0: no limit."""

    def __init__(
        self,
        *names: str,
        protocol_version: int = PROTOCOL_VERSION,
        step_seconds: float = 0.3,
        slots: int = 0,
    ) -> None:
        self.names = names
        self.slots = slots
        self.protocol_version = protocol_version
        self.step_seconds = step_seconds
        self.address = ""
        self.acts_as: dict[str, str] = {}
        self.begun: list[str] = []
        self.open = self.most_open = self.refused = 0
        self.full = False

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeResponse:
        described = [
            pb.EnvironmentDescription(
                name=name,
                summary="for tests",
                step_timeout_seconds=self.step_seconds,
                max_parallel_episodes=self.slots,
            )
            for name in self.names
        ]
        return pb.DescribeResponse(environments=described, protocol_version=self.protocol_version, scorers=["good"])

    async def Episode(
        self, requests: AsyncIterator[pb.EpisodeRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.EpisodeResponse]:
        self.open += 1
        try:
            async for request in requests:
                if request.HasField("reset"):
                    asked = request.reset.environment
                    name = self.acts_as.get(asked, asked)
                    if self.full or 0 < self.slots < self.open:
                        self.refused += 1
                        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
                    if name == "lacks_item":
                        await context.abort(grpc.StatusCode.NOT_FOUND, "no item 17")
                    self.begun.append(name)
                    self.most_open = max(self.most_open, self.open)
                    yield pb.EpisodeResponse(observation=request.reset.task_json)
                    continue
                turn = request.action.turn
                if name == "silent":
                    await asyncio.sleep(60)
                elif name == "crash":
                    await context.abort(grpc.StatusCode.INTERNAL, "broken inside")
                elif name == "lost":
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the machine is gone")
                elif name in ("loses_item", "leaves"):
                    if name == "leaves":
                        self.names = ()
                        asyncio.get_running_loop().call_later(0.3, setattr, self, "names", (asked,))
                    await context.abort(grpc.StatusCode.NOT_FOUND, "no item 17")
                elif name == "told":
                    await context.abort(grpc.StatusCode.DATA_LOSS, "its reward is nan")
                elif name == "wordy":
                    await context.abort(grpc.StatusCode.INTERNAL, "x" * 100_000)
                elif name == "renaming":
                    yield pb.EpisodeResponse(turn=turn, metrics={f"{turn} {index}": 1.0 for index in range(100)})
                    continue
                elif name == "refuse":
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "task.nums: is missing")
                elif name == "end":
                    return
                elif name == "twice":
                    yield pb.EpisodeResponse(turn=turn)
                yield pb.EpisodeResponse(**{"turn": turn, "reward": 0.5, "done": turn == 3, **LIES.get(name, {})})  # type: ignore[arg-type]
        finally:
            self.open -= 1

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreResponse:
        if request.scorer == "short":
            return pb.ScoreResponse()
        if request.scorer in SCORES:
            return pb.ScoreResponse(scores=[pb.Score(**SCORES[request.scorer]) for _ in request.items])  # type: ignore[arg-type]
        if request.scorer == "good" and "lacks_item" in self.acts_as.values():
            await context.abort(grpc.StatusCode.NOT_FOUND, "no item 17")
        return pb.ScoreResponse(scores=[pb.Score(reward=0.25) for _ in request.items])


@asynccontextmanager
async def serving(provider: ScriptedProvider, address: str = "127.0.0.1:0") -> AsyncIterator[ScriptedProvider]:
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(provider, server)
    provider.address = f"127.0.0.1:{server.add_insecure_port(address)}"
    await server.start()
    try:
        yield provider
    finally:
        await server.stop(grace=0)
