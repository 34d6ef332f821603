"""The gRPC edge of the explorer that samples by tenants' adapters."""

import asyncio

import grpc.aio

from trinity.api.explorer.v1 import sampler_pb2 as pb
from trinity.api.explorer.v1 import sampler_pb2_grpc
from trinity.api.tinker.v1 import tinker_pb2
from trinity.explorer.engine.versions import Versions
from trinity.explorer.types import EngineFailed
from trinity.runtime.errors import Unavailable
from trinity.tinker.commands.wire import sample_from_proto, samples_to_proto
from trinity.tinker.sampler.sampling import sample
from trinity.tinker.sampler.seconds import Seconds
from trinity.tinker.sampler.turns import Turns


class SamplerServicer(sampler_pb2_grpc.SamplerServiceServicer):
    """Requests wait until the engine has started."""

    def __init__(self) -> None:
        self._engine: tuple[Versions, Seconds, Turns] | None = None
        self._started = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> str:
        """Adds the servicer. Returns the full name of the gRPC service."""
        sampler_pb2_grpc.add_SamplerServiceServicer_to_server(self, server)
        return str(pb.DESCRIPTOR.services_by_name["SamplerService"].full_name)

    def serve(self, versions: Versions, seconds: Seconds) -> None:
        self._engine = versions, seconds, Turns()
        self._started.set()

    async def Sample(self, request: pb.SampleRequest, context: grpc.aio.ServicerContext) -> tinker_pb2.SampleResponse:
        await self._started.wait()
        assert self._engine is not None
        try:
            return samples_to_proto(await sample(*self._engine, sample_from_proto(request)))
        except EngineFailed as error:  # the process ends, and another one may answer
            raise Unavailable(str(error)) from error
