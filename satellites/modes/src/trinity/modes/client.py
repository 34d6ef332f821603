"""Tasks of an explorer, offered to a run's buffer."""

from collections.abc import Sequence

from trinity.api.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from trinity.data.experience import Task
from trinity.data.wire import task_to_proto
from trinity.reading.errors import RunError
from trinity.reading.render import visible
from trinity.runtime import rpc
from trinity.runtime.errors import Conflict, InvalidInput, PermissionDenied, TrinityError, Unauthenticated, Unavailable

_LONGEST_REFUSAL = 500  # characters


async def publish_joined(
    address: str, run: str, name: str, weight: float, first: int, tasks: Sequence[Task], seconds: float
) -> int:
    """Offers tasks of an explorer's taskset to a run's buffer for `seconds`.

    Returns the position after the fed tasks. Raises Unavailable if the buffer cannot be reached, RunError if it refuses
    the taskset.
    """
    joined = buffer_pb2.JoinedTaskset(name=name, weight=weight, first_position=first)
    request = buffer_pb2.PublishTasksRequest(run=run, tasks=map(task_to_proto, tasks), joined=joined)
    async with rpc.channel(address) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        try:
            answer = await rpc.ask(stub.PublishTasks, request, seconds=seconds)
        except (Conflict, InvalidInput, PermissionDenied, Unauthenticated) as error:
            raise RunError(visible(str(error))[:_LONGEST_REFUSAL], code=2) from None
        except TrinityError as error:
            raise Unavailable(str(error)) from None
        return int(answer.position)
