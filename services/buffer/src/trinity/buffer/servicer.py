"""The gRPC edge of the buffer."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc.aio

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.buffer.v1 import buffer_pb2_grpc
from trinity.api.common.v1 import task_pb2
from trinity.buffer.evaluation.evaluator import Evaluator
from trinity.buffer.ledger.fork import parts_after
from trinity.buffer.ledger.wire import entry_to_proto, part_to_proto
from trinity.buffer.log.reader import check_fence
from trinity.buffer.readonly import ReadOnlyRun
from trinity.buffer.run import Run
from trinity.buffer.tasks.feeder import Feeder
from trinity.buffer.tasks.joined import why_not_joined
from trinity.buffer.window.window import Window
from trinity.data.experience import Task
from trinity.data.wire import task_from_proto
from trinity.runtime.errors import Conflict, Full, InvalidInput, NotFound, Unavailable
from trinity.runtime.trust.identity import calling
from trinity.runtime.trust.roles import Role

_DEFAULT_LIMIT = 100
_HEADER_BYTES = 16_384  # more than a task's message has besides the task
_INJECT_SECONDS = 30.0
_LONGEST_REASON = 500
_LONGEST_ID = 1024  # characters; a ledger entry has the ids of its tasks
_MOST_OF_EVALUATIONS = 16 * 2**20  # bytes of a response
# Fields of a window that StatsResponse has under the same name.
_COUNTS = (
    "stored", "dead_letters", "duplicates_dropped", "failed_attempts", "sampled_tokens", "prompts_cut",
    "moved_episodes", "refused", "cut_tasks", "late_groups",
)  # fmt: skip


class BufferServicer(buffer_pb2_grpc.BufferServiceServicer):
    def __init__(self) -> None:
        self._run: Run | None = None

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Add it to a server; returns the full gRPC service names."""
        buffer_pb2_grpc.add_BufferServiceServicer_to_server(self, server)
        return [pb.DESCRIPTOR.services_by_name["BufferService"].full_name]

    def attach(self, run: Run) -> None:
        """The run is open: calls can be served from now on."""
        self._run = run

    def _of(self, run: str) -> Run:
        if self._run is None:
            raise Unavailable("the buffer is still starting")
        if run != self._run.context.run:
            raise NotFound(f"run: is {run!r}, this buffer serves {self._run.context.run!r}")
        return self._run

    async def PublishTasks(
        self, request: pb.PublishTasksRequest, context: grpc.aio.ServicerContext
    ) -> pb.PublishTasksResponse:
        run = self._of(request.run)
        if run.feeder is None:
            raise Conflict("run: this run learns from a dataset and takes no tasks")
        if request.HasField("joined"):
            return await _join(run, run.feeder, request, context.time_remaining() or _INJECT_SECONDS)
        tasks = [_training_task(run, message) for message in request.tasks]
        if taken := next((task.task_id for task in tasks if run.feeder.given.is_own(task.task_id)), ""):
            problem = f"is {taken[:200]!r}; ids that begin so are of a taskset of the run, give the task another"
            raise InvalidInput("tasks.task_id", problem)
        waits = await run.feeder.inject(tasks)
        stored, is_all = await _stored(run, waits, context.time_remaining() or _INJECT_SECONDS)
        if not is_all:
            raise Full(f"tasks: the staleness bound left room for {stored} of {len(waits)}; send the rest again later")
        return pb.PublishTasksResponse(stored=stored)

    async def StreamBatches(
        self, request: pb.StreamBatchesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.BatchPart]:
        if request.from_step < 1:
            raise InvalidInput("from_step", f"is {request.from_step}, must be >= 1")
        caller = calling.get()
        by_trainer = caller is None or caller.role is Role.TRAINER
        waits = request.waits if request.HasField("waits") else None
        async for part in self._of(request.run).batches.parts(request.from_step, by_trainer, waits):
            yield part_to_proto(part)

    async def CommitStep(
        self, request: pb.CommitStepRequest, context: grpc.aio.ServicerContext
    ) -> pb.CommitStepResponse:
        run = self._of(request.run)
        if not 0 <= request.oldest_kept_step <= request.step:
            raise InvalidInput("oldest_kept_step", f"is {request.oldest_kept_step}, must be in [0, {request.step}]")
        if request.step > run.ledger.newest_step:
            raise InvalidInput("step", f"is {request.step}, the ledger ends at {run.ledger.newest_step}")
        return pb.CommitStepResponse(oldest_step=await run.commit(request.step, request.oldest_kept_step))

    async def Rewind(self, request: pb.RewindRequest, context: grpc.aio.ServicerContext) -> pb.RewindResponse:
        run = self._of(request.run)
        if request.step < 0:
            raise InvalidInput("step", f"is {request.step}, must be >= 0")
        await run.rewind(request.step)
        return pb.RewindResponse(newest_step=run.ledger.newest_step, last_step=run.context.last_step)

    async def GetLedgerEntry(
        self, request: pb.GetLedgerEntryRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetLedgerEntryResponse:
        return pb.GetLedgerEntryResponse(entry=entry_to_proto(await self._of(request.run).ledger.get(request.step)))

    async def Fork(self, request: pb.ForkRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.BatchPart]:
        run = self._of(request.run)
        async for part in parts_after(run.context.plan, run.ledger, run.reader, request.step, request.through_step):
            yield part_to_proto(part)

    async def SkipStep(self, request: pb.SkipStepRequest, context: grpc.aio.ServicerContext) -> pb.SkipStepResponse:
        run = self._of(request.run)
        if not 1 <= len(request.reason) <= _LONGEST_REASON:
            problem = f"has {len(request.reason)} characters, must have 1 to {_LONGEST_REASON}"
            raise InvalidInput("reason", problem)
        return pb.SkipStepResponse(entry=entry_to_proto(await run.skip(request.step, request.reason)))

    async def Stats(self, request: pb.StatsRequest, context: grpc.aio.ServicerContext) -> pb.StatsResponse:
        return await stats_of(self._of(request.run))

    async def ListDeadLetters(
        self, request: pb.ListDeadLettersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListDeadLettersResponse:
        run = self._of(request.run)
        if request.limit < 0:
            raise InvalidInput("limit", f"is {request.limit}, must be >= 0; 0 means {_DEFAULT_LIMIT}")
        letters = await run.letters.show(request.limit or _DEFAULT_LIMIT, request.ordinal)
        return pb.ListDeadLettersResponse(dead_letters=[letter.fields for letter in letters])

    async def RetryDeadLetters(
        self, request: pb.RetryDeadLettersRequest, context: grpc.aio.ServicerContext
    ) -> pb.RetryDeadLettersResponse:
        run = self._of(request.run)
        if run.feeder is None:
            raise Conflict("run: this run takes no tasks; nothing can be fed again")
        return pb.RetryDeadLettersResponse(ordinals=await run.letters.retry(request.ordinals))

    async def DropDeadLetters(
        self, request: pb.DropDeadLettersRequest, context: grpc.aio.ServicerContext
    ) -> pb.DropDeadLettersResponse:
        return pb.DropDeadLettersResponse(ordinals=await self._of(request.run).letters.drop(request.ordinals))

    async def Fence(self, request: pb.FenceRequest, context: grpc.aio.ServicerContext) -> pb.FenceResponse:
        run = self._of(request.run)
        check_fence(request.versions)
        return pb.FenceResponse(dropped=await run.fence(request.versions))


class ReadOnlyServicer(BufferServicer):
    """Refuses what would change the run, a skipped step excepted, and does not wait for steps that are not there."""

    async def StreamBatches(
        self, request: pb.StreamBatchesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.BatchPart]:
        newest = self._of(request.run).ledger.newest_step
        if request.from_step > newest:
            raise NotFound(f"from_step: {request.from_step} has no ledger entry; the newest is {newest}")
        async for part in super().StreamBatches(request, context):
            yield part

    async def Stats(self, request: pb.StatsRequest, context: grpc.aio.ServicerContext) -> pb.StatsResponse:
        run = self._of(request.run)
        response = await stats_of(run)
        if isinstance(run, ReadOnlyRun):
            _count(response, *await run.counts())
        return response

    async def _refuse(self, request: Any, context: grpc.aio.ServicerContext) -> NoReturn:
        raise Conflict("this buffer only reads (TRINITY_BUFFER_READ_ONLY); call the buffer of a live run")

    PublishTasks = CommitStep = RetryDeadLetters = DropDeadLetters = Fence = _refuse


def _training_task(run: Run, message: task_pb2.Task, **fields: Any) -> Task:
    filled = task_pb2.Task()
    filled.CopyFrom(message)
    filled.kind = task_pb2.TASK_KIND_TRAIN
    for name, value in fields.items():
        setattr(filled, name, value)
    if len(filled.task_id) > _LONGEST_ID:
        problem = f"has one of {len(filled.task_id)} characters, {filled.task_id[:80]!r}; may have {_LONGEST_ID}"
        raise InvalidInput("tasks.task_id", f"{problem}, put the rest into row_json")
    size, most = filled.ByteSize() + _HEADER_BYTES, run.context.broker.most_bytes
    if size > most:
        raise InvalidInput("tasks", f"have one of {size} bytes, {filled.task_id[:200]!r}; NATS takes {most}")
    return task_from_proto(filled)


async def _join(run: Run, feeder: Feeder, request: pb.PublishTasksRequest, seconds: float) -> pb.PublishTasksResponse:
    """Mix tasks of a joining explorer with the run's, until all are fed or the caller's time is over."""
    plan, joined = run.context.plan, request.joined
    problem = why_not_joined(plan)
    if problem:
        raise Conflict(f"joined: {problem}")
    if joined.name in (taskset.name for taskset in plan.tasksets):
        raise InvalidInput("joined.name", f"{joined.name!r} is a taskset of the run; give another name")
    if name_problem := feeder.joined.problem(joined.name):
        raise InvalidInput("joined.name", name_problem)
    if not 0 < joined.weight < math.inf:
        raise InvalidInput("joined.weight", f"is {joined.weight}, must be > 0 and finite")
    next_position = feeder.joined.position(joined.name)
    if not 0 <= joined.first_position <= next_position:
        problem = f"is {joined.first_position}, must be in [0, {next_position}], which is where the taskset was fed to"
        raise InvalidInput("joined.first_position", problem)
    fields = {
        "taskset": joined.name,
        "repeat_times": plan.config.algorithm.repeat_times,
        "timeout_seconds": plan.config.explorer.max_timeout,
        "max_attempts": plan.config.explorer.max_retry_times + 1,
        "greedy_baseline": plan.algorithm.needs_greedy_baseline,
    }
    given = request.tasks[next_position - joined.first_position :]
    tasks = [_training_task(run, message, **fields) for message in given]
    if strange := next((task.task_id for task in tasks if not task.task_id.startswith(f"{joined.name}/")), ""):
        raise InvalidInput("tasks.task_id", f"is {strange[:200]!r}, must begin with {joined.name + '/'!r}")
    stored, _ = await _stored(run, await feeder.join(joined.name, joined.weight, tasks), seconds)
    return pb.PublishTasksResponse(stored=stored, position=feeder.joined.fed(joined.name))


async def _stored(run: Run, waits: "list[asyncio.Future[bool]]", seconds: float) -> tuple[int, bool]:
    """Waits for the tasks of a call. Returns the number stored by it, and False if time ended before the last."""
    done = lambda: all(wait.done() for wait in waits)  # noqa: E731
    try:
        is_all = await run.context.changed.wait_for(done, max(0.1, seconds - 0.5))
        return sum(wait.done() and wait.result() for wait in waits), is_all
    finally:  # also when the caller is gone
        for wait in waits:
            wait.cancel()


def _count(response: pb.StatsResponse, window: Window, fed: int) -> None:
    """Fill in the counts of a window; `fed`: tasks fed, requeued ones included."""
    response.fed = fed - len(window.requeued)
    response.outstanding = fed - window.num_ended
    for name in _COUNTS:
        setattr(response, name, getattr(window, name))
    response.dropped.update(window.dropped)
    response.waiting_by_version.update(Counter(group.newest_version for group in window.unused.values()))


async def stats_of(run: Run) -> pb.StatsResponse:
    """Counts of one run."""
    shared, newest = run.context, run.ledger.newest
    response = pb.StatsResponse(
        run=shared.run,
        ledger_step=run.ledger.newest_step,
        committed_step=shared.committed_step,
        last_step=shared.last_step,
        max_staleness_steps=shared.plan.staleness.bound,
        groups_per_step=shared.plan.groups_per_step,
        live_step=shared.live_step,
        finished=run.finished,
        skipped_steps=sorted(run.ledger.skipped),
    )
    if newest is not None:
        response.reward_mean = newest.reward_mean
        response.staleness_max = max((group.staleness_steps for group in newest.groups), default=0)
    if run.ledger.newest_step < shared.last_step:
        response.waiting_for = run.batches.waiting(run.ledger.newest_step + 1).reason
    if run.writer is not None and run.feeder is not None:
        _count(response, run.writer.window, run.feeder.fed)
        response.failure_causes.update(run.writer.failures.causes)
        response.last_failure = run.writer.failures.newest
    if run.retention is not None:
        response.log_bytes = run.retention.log_bytes
        response.log_limit_bytes = shared.capacity.limit_bytes
        response.archive_behind = run.retention.behind
    if run.evaluator is None:
        return response
    response.evaluation_tokens = run.evaluator.tokens
    response.evaluations_outstanding = run.evaluator.outstanding
    response.evaluations.extend(_newest_evaluations(run.evaluator, shared.plan.config.monitor.detailed_stats))
    return response


def _newest_evaluations(evaluator: Evaluator, detailed: bool) -> list[pb.Evaluation]:
    """Returns those that fit into a response, oldest first."""
    found: list[pb.Evaluation] = []
    room = _MOST_OF_EVALUATIONS
    for tally in reversed(evaluator.finished):
        names = ("step", "taskset", "oldest_version", "newest_version")
        one = pb.Evaluation(**{name: getattr(tally, name) for name in names}, metrics=tally.metrics(detailed))
        room -= one.ByteSize()
        if room < 0:
            break
        found.append(one)
    return found[::-1]
