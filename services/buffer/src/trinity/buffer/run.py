"""One run in the buffer: its parts, and how they are wired."""

import asyncio
import json

import structlog

from trinity.buffer.batches import BatchServer
from trinity.buffer.evaluation import Evaluator
from trinity.buffer.feeder import Feeder
from trinity.buffer.keeper import Keeper
from trinity.buffer.ledger import Ledger
from trinity.buffer.log import LogReader
from trinity.buffer.offline import OfflineSource
from trinity.buffer.shared import RunContext
from trinity.buffer.tasks import TaskSource
from trinity.config.plan import Plan
from trinity.runtime.broker import Bucket
from trinity.runtime.errors import DataLoss
from trinity.runtime.experience import TaskKind

log = structlog.get_logger(__name__)


class Run:
    """open -> run for ever. State is rebuilt from NATS alone."""

    def __init__(self, context: RunContext, versions: Bucket, runs: Bucket, cache_bytes: int) -> None:
        plan: Plan = context.plan
        self.context = context
        self.ledger = Ledger(context)
        self._versions = versions
        self._runs = runs
        self.reader = LogReader(context, cache_bytes)
        self.keeper: Keeper | None = None
        self.feeder: Feeder | None = None
        self.evaluator: Evaluator | None = None
        self.offline: OfflineSource | None = None
        if plan.algorithm.offline:
            source = plan.config.buffer.trainer_input.experience_buffer
            assert source is not None
            self.offline = OfflineSource(context, self.ledger, source)
            context.last_step = plan.steps_for(len(self.offline))
        else:
            assert plan.taskset is not None
            tasks = TaskSource.open(context.run, plan, plan.taskset, TaskKind.TRAIN)
            context.last_step = plan.steps_for(len(tasks.rows))
            self.keeper = Keeper(context, self.ledger, self.reader)
            self._tasks = tasks
            evaluated = [TaskSource.open(context.run, plan, t, TaskKind.EVALUATION) for t in plan.eval_tasksets]
            self.evaluator = Evaluator(context, evaluated)
        self.batches = BatchServer(context, self.ledger, self.reader, self.keeper, self.offline)

    async def open(self) -> None:
        """Find out how far the run came."""
        await self.ledger.open()
        commit = await self._runs.get(self.context.names.commit_key)
        self.context.committed_step = json.loads(commit.value)["step"] if commit.revision else 0
        if self.keeper is not None and self.evaluator is not None:
            self.keeper.recover()
            self.feeder = Feeder(self.context, self._tasks, self.keeper.window)
            await self.feeder.recover()
            await self.evaluator.recover()

    async def run(self) -> None:
        """Until something fails; what ends by itself is a failure too."""
        loops = [self._follow_live()]
        if self.offline is not None:
            loops.append(self.offline.run())
        if self.keeper and self.feeder and self.evaluator:
            loops += [self.keeper.run(), self.feeder.run(), self.feeder.clear()]
            loops += [self.evaluator.feed(), self.evaluator.collect()]
        async with asyncio.TaskGroup() as group:
            for loop in loops:
                group.create_task(loop)

    async def _follow_live(self) -> None:
        async for entry in self._versions.watch(self.context.names.live_key):
            if entry.revision:
                self.context.live_step = json.loads(entry.value)["step"]
                await self.context.bell.ring()

    async def rewind(self, step: int) -> None:
        """The trainer goes on after `step`. DataLoss unless every later entry can still be served."""
        newest = self.ledger.newest_step
        if step > newest:
            raise DataLoss(
                f"step: the trainer's checkpoint is of step {step}, but the ledger ends at step {newest}; "
                "the job folder and this NATS do not belong together"
            )
        if step == newest or self.offline is not None:
            return
        entry = await self.ledger.get(step + 1)
        first = (await self.context.broker.state(self.context.names.experiences_stream)).first_sequence
        gone = [group.log_sequence for group in entry.groups if group.log_sequence < first]
        if gone:
            raise DataLoss(f"step: experience of step {step + 1} was released; go on from a newer checkpoint")

    async def commit(self, step: int, oldest_kept_step: int) -> int:
        """A checkpoint is durable: release what no kept one can ask for. Returns the lowest step still served."""
        value = json.dumps({"step": step, "oldest_kept_step": oldest_kept_step}).encode()
        await self._runs.update(self.context.names.commit_key, lambda _: value)
        self.context.committed_step = step
        await self.context.bell.ring()
        if self.keeper is None or oldest_kept_step < 1:
            return 1
        cursor = (await self.ledger.get(oldest_kept_step)).cursor
        floor = min((g.log_sequence for g in cursor.pending), default=cursor.log_sequence + 1)
        await self.context.broker.purge_below(self.context.names.experiences_stream, floor)
        if self.feeder is not None and cursor.consumed_ordinal < self.feeder.fed:
            await self.context.broker.purge_below(self.context.names.tasks_stream, cursor.consumed_ordinal + 1)
        return oldest_kept_step + 1

    @property
    def finished(self) -> bool:
        """The last step is committed and every evaluation has ended."""
        done = 0 < self.context.last_step <= self.context.committed_step
        return done and (self.evaluator is None or self.evaluator.idle)
