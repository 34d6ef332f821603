"""Hand-written peers of the buffer: an explorer that answers tasks at once, and a trainer that only takes batches."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio

from support.fakes.data.experience import make_group
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.buffer.v1 import buffer_pb2_grpc
from trinity.api.sync.v1 import sync_pb2, sync_pb2_grpc
from trinity.data.experience import AttemptFailure, Group, Outcome, Task
from trinity.explorer.rollout import attempt
from trinity.explorer.rollout.task_queue import TaskQueue
from trinity.runtime import names, rpc
from trinity.runtime.broker import Broker, Message, connect
from trinity.runtime.errors import FailureCause
from trinity.runtime.trust import nats_users
from trinity.runtime.trust.roles import Role
from trinity.weights.manifest import Canary, Manifest, manifest_of_folder
from trinity.weights.wire import manifest_to_proto

Answer = Callable[[Task, int], Outcome | None]


def a_group(task: Task, deliveries: int) -> Outcome:
    return make_group(task, version=task.gate_step, attempt=deliveries)


def a_failure(task: Task, deliveries: int) -> Outcome:
    return AttemptFailure(task, deliveries, "tester", FailureCause.WORKFLOW_ERROR, "it always fails", False, 1.0)


@contextlib.asynccontextmanager
async def explorer(
    url: str,
    run: str,
    answer: Answer = a_group,
    *,
    publish_twice: bool = False,
    on_wait: Callable[[bool], None] = lambda _: None,
    drains: bool = False,
    tasks_at_once: int = 16,
    seconds: float = 0.0,
) -> AsyncIterator[None]:
    """The explorer's own leases and log, without an engine. drains: its tasks are handed back in the end.

    Where `answer` is None, it acknowledges the task without a result. A task takes `seconds`.
    """
    run_names = names.RunNames(run)
    async with await connect(url, "tester", creds=_explorers(run)) as broker:

        async def work(task: Task, message: Message) -> None:
            await asyncio.sleep(seconds)
            outcome = answer(task, message.deliveries)
            if outcome is None:
                await message.ack()
                return
            await attempt.store(broker, run_names, outcome, on_wait)
            if publish_twice:
                await publish_again(broker, run_names, outcome, message.sequence)
            if isinstance(outcome, Group):
                await message.ack()
            else:
                await message.retry(0.05)

        queues = [
            TaskQueue(broker, stream, tasks_at_once, work)
            for stream in (run_names.tasks_stream, run_names.evaluation_tasks_stream)
        ]
        running = [asyncio.create_task(queue.run()) for queue in queues]
        try:
            yield
        finally:
            if drains:
                await asyncio.gather(*(queue.drain(5.0) for queue in queues))
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def _explorers(run: str) -> Path | None:
    """Credentials of an explorer, from the accounts' folder in which the test's credentials are."""
    admin = os.environ.get("TRINITY_NATS_CREDS")
    return nats_users.user_file(Path(admin).parent, Role.EXPLORER, "tester", run) if admin else None


async def publish_again(broker: Broker, run_names: names.RunNames, outcome: Outcome, mark: int) -> None:
    """The same group under another message id, like a group after the broker's dedupe window."""
    from trinity.data.wire import encode_outcome

    assert isinstance(outcome, Group)
    subject = run_names.experience(names.owner_of(outcome.explorer_id), outcome.versions[0], outcome.task.taskset)
    await broker.publish(subject, encode_outcome(outcome), message_id=f"again/{mark}")


class FakeTrainer:
    """Takes batches, makes versions without files, commits."""

    def __init__(self, run: str, buffer: str, sync: str, identity: rpc.Shown = "own") -> None:
        self.run = run
        self._lease_id = ""
        self._channels = [rpc.channel(buffer, identity=identity), rpc.channel(sync, identity=identity)]
        self.buffer = buffer_pb2_grpc.BufferServiceStub(self._channels[0])
        self.sync = sync_pb2_grpc.SyncServiceStub(self._channels[1])

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def claim(self) -> None:
        """From now on, only this trainer makes versions."""
        asked = sync_pb2.ClaimRequest(run=self.run, trainer_id="trainer", pid=1, host="here")
        self._lease_id = (await self.sync.Claim(asked, timeout=20)).lease_id

    async def begin(self) -> None:
        """Version 0, the base model, goes LIVE."""
        await self._commit(Manifest(self.run, 0, 0, (), (), (), 1.0, "base"))

    async def publish(self, step: int, folder: Path, canary: Canary | None = None) -> None:
        """Weights of one number, for the step, go LIVE; with a canary as soon as an explorer has reproduced it."""
        header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")
        await self._commit(replace(manifest_of_folder(self.run, step, folder), canary=canary))

    async def _commit(self, manifest: Manifest) -> None:
        try:
            asked = sync_pb2.PublishRequest(manifest=manifest_to_proto(manifest), lease_id=self._lease_id)
            await self.sync.Publish(asked, timeout=20)
        except grpc.aio.AioRpcError as error:  # it may have been rejected meanwhile
            if manifest.canary is None or error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise

    async def batch(self, step: int, seconds: float = 60.0) -> list[bytes]:
        """The parts of the batch of one step, serialised, waiting parts left out. Retries while the buffer is away."""
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return await self._batch(step)
                except grpc.aio.AioRpcError as error:
                    if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                        raise
                    await asyncio.sleep(0.1)

    async def train(self, steps: int, interval: int, folder: Path) -> None:
        """Takes the batches of steps 1 to `steps`, and publishes a version after every `interval` steps."""
        for step in range(1, steps + 1):
            await self.batch(step, seconds=150)
            if step % interval == 0:
                await self.publish(step, folder / f"version-{step}")

    async def _batch(self, step: int) -> list[bytes]:
        parts: list[bytes] = []
        call = self.buffer.StreamBatches(pb.StreamBatchesRequest(run=self.run, from_step=step))
        async for part in call:
            if part.WhichOneof("part") != "waiting":
                parts.append(part.SerializeToString(deterministic=True))
            if part.WhichOneof("part") == "end":
                call.cancel()
                return parts
        raise AssertionError(f"the stream ended before step {step}: {parts}")

    async def stats(self) -> pb.StatsResponse:
        return await self.buffer.Stats(pb.StatsRequest(run=self.run), timeout=20)

    async def entry(self, step: int) -> pb.LedgerEntry:
        answer = await self.buffer.GetLedgerEntry(pb.GetLedgerEntryRequest(run=self.run, step=step), timeout=20)
        return answer.entry
