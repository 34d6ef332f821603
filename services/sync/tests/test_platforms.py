"""All explorers of a reproducible run sample on the same platform: the one that the first has announced."""

import grpc.aio
import pytest

from support.servers.sync_instances import served
from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc

pytestmark = pytest.mark.core

CPU, GPU = "cpu with AVX512, 2 cores, torch 2.13.0", "1 x NVIDIA H200, torch 2.13.0"


async def join(stub: sync_pb2_grpc.SyncServiceStub, name: str, platform: str) -> str:
    """The lease, or why there is none."""
    able = pb.Capabilities(transports=["folder"], platform=platform)
    request = pb.JoinRequest(run="r", explorer_id=name, pid=1, host="h", capabilities=able)
    try:
        return str((await stub.Join(request, timeout=20)).lease_id)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"


async def test_one_that_differs_is_refused_with_both(nats_url: str) -> None:
    async with served(nats_url) as stub:
        lease = await join(stub, "first", GPU)
        assert lease.startswith("first") and (await join(stub, "same", GPU)).startswith("same")
        refused = await join(stub, "other", CPU)
        assert refused == (
            f"FAILED_PRECONDITION: capabilities.platform: is {CPU}; the run is reproducible, and first samples on "
            f"{GPU}, whose bits may differ; start this explorer on the same"
        )
        await stub.Leave(pb.LeaveRequest(run="r", lease_id=lease), timeout=20)
    async with served(nats_url) as stub:  # also after the first has left, and by another process of the service
        assert await join(stub, "other", CPU) == refused
        assert (await join(stub, "other", GPU)).startswith("other")


async def test_explorers_of_other_runs_say_none(nats_url: str) -> None:
    async with served(nats_url) as stub:
        assert (await join(stub, "a", "")).startswith("a") and (await join(stub, "b", "")).startswith("b")


@pytest.mark.parametrize("platform", ["x" * 257, "cpu\n2"])
async def test_text_that_is_no_platform_is_refused(nats_url: str, platform: str) -> None:
    async with served(nats_url) as stub:
        refused = await join(stub, "a", platform)
        assert refused.startswith(f"INVALID_ARGUMENT: capabilities.platform: has {len(platform)} characters")
