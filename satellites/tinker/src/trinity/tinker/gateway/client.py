"""The explorer that samples by tenants' adapters."""

import grpc

from trinity.api.explorer.v1 import sampler_pb2_grpc
from trinity.runtime import rpc
from trinity.runtime.errors import TimedOut, Unavailable
from trinity.tinker.commands.samples import Sample
from trinity.tinker.commands.wire import sample_to_proto

_ATTEMPTS = 3


class SamplerClient:
    """Waits for an explorer that starts again, and repeats a request that it left unanswered."""

    def __init__(self, address: str, seconds: float) -> None:
        """seconds: until a request fails that was not answered."""
        self._channel = rpc.channel(address)
        self._stub = sampler_pb2_grpc.SamplerServiceStub(self._channel)
        self._seconds = seconds

    @property
    def is_there(self) -> bool:
        return self._channel.get_state(True) in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.IDLE)

    async def sample(self, sample: Sample) -> bytes:
        """Returns the body that the client reads.

        Raises the explorer's errors; TimedOut; Unavailable for a request that ended the explorer so often that it may
        be the cause.
        """
        request = sample_to_proto(sample)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with rpc.translate(self._stub.Sample):
                    answer = await self._stub.Sample(request, timeout=self._seconds, wait_for_ready=True)
                return bytes(answer.SerializeToString())
            except TimedOut:
                what = "the engine starts, or samples for others: ask for fewer or shorter sequences at a time"
                raise TimedOut(f"no samples within {self._seconds:g} s; {what}, or raise sample_minutes") from None
            except Unavailable:
                if attempt == _ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    async def close(self) -> None:
        await self._channel.close()
