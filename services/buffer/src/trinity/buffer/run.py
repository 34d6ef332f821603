"""One run in the buffer: its parts, and how they are wired."""

import asyncio
import contextlib
import json

import structlog

from trinity.api.common.v1 import task_pb2
from trinity.buffer.batches import BatchServer
from trinity.buffer.evaluation import Evaluator
from trinity.buffer.feeder import Feeder
from trinity.buffer.keeper import Keeper
from trinity.buffer.ledger import Ledger
from trinity.buffer.log import LogReader
from trinity.buffer.mixture import Mixture
from trinity.buffer.offline import OfflineSource
from trinity.buffer.report import Reporter
from trinity.buffer.selectors import DifficultyBased
from trinity.buffer.shared import RunContext
from trinity.buffer.tasks import TaskSource
from trinity.config.plan import Plan
from trinity.config.service import monitor_fields
from trinity.runtime import files
from trinity.runtime.broker import Bucket
from trinity.runtime.errors import DataLoss, NotFound
from trinity.runtime.experience import TaskKind
from trinity.runtime.monitor import MonitorOptions, open_monitor

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
        self._tasks: Mixture | None = None
        trains = plan.config.mode in ("both", "train")
        if plan.algorithm.offline:
            source = plan.config.buffer.trainer_input.experience_buffer
            assert source is not None
            self.offline = OfflineSource(context, self.ledger, source)
            context.last_step = plan.steps_for(len(self.offline))
        elif trains:
            sources = [TaskSource.open(context.run, plan, t, TaskKind.TRAIN) for t in plan.tasksets]
            self._tasks = Mixture(sources)
            context.last_step = plan.steps_for(self._tasks.rows)
        self._reporter = reporter = Reporter(plan, self._tasks)
        if not plan.algorithm.offline:
            self.keeper = Keeper(context, self.ledger, self.reader, reporter) if trains else None
            evaluated = [TaskSource.open(context.run, plan, t, TaskKind.EVALUATION) for t in plan.eval_tasksets]
            self.evaluator = Evaluator(context, evaluated, reporter.evaluated)
        self.batches = BatchServer(context, self.ledger, self.reader, self.keeper, self.offline)

    async def open(self) -> None:
        """Find out how far the run came."""
        await self.ledger.open()
        fields = monitor_fields(self.context.plan, "explorer")
        if self.offline is not None:  # nothing is explored
            fields["kind"] = "none"
        self._reporter.monitor = await asyncio.to_thread(
            open_monitor, MonitorOptions(**fields), self.ledger.newest_step
        )
        commit = await self._runs.get(self.context.names.commit_key)
        self.context.committed_step = json.loads(commit.value)["step"] if commit.revision else 0
        if self.keeper is not None and self._tasks is not None:
            self.keeper.recover()
            self.feeder = Feeder(self.context, self._tasks, self.keeper.window)
            await self.feeder.recover()
            await self._remind_selectors()
        if self.evaluator is not None:
            await self.evaluator.recover()

    async def _remind_selectors(self) -> None:
        """Tell selectors that learn what earlier groups were worth, and which tasks are still out."""
        assert self._tasks is not None and self.keeper is not None and self.feeder is not None
        if not any(isinstance(source.selector, DifficultyBased) for source in self._tasks.sources):
            return
        for step in range(1, self.ledger.newest_step + 1):
            for member in (await self.ledger.get(step)).groups:
                self._tasks.observe(member.task_id, member.reward_mean)
        for group in self.keeper.window.pending.values():
            self._tasks.observe(group.task_id, group.reward_mean)
        for ordinal in range(self.keeper.window.consumed_ordinal + 1, self.feeder.fed + 1):
            with contextlib.suppress(NotFound):  # dead tasks are not in the queue any more
                message = await self.context.broker.get(self.context.names.tasks_stream, ordinal)
                self._tasks.observe(task_pb2.Task.FromString(message.data).task_id, None)

    async def run(self) -> None:
        """Until something fails; what ends by itself is a failure too."""
        loops = [self._follow_live()]
        if self.offline is not None:
            loops.append(self.offline.run())
        if self.keeper and self.feeder:
            loops += [self.keeper.run(), self.feeder.run(), self.feeder.clear()]
        if self.evaluator:
            loops += [self.evaluator.feed(), self.evaluator.collect()]
        try:
            async with asyncio.TaskGroup() as group:
                for loop in loops:
                    group.create_task(loop)
        finally:
            if self._reporter.monitor is not None:
                self._reporter.monitor.close()

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
        await asyncio.to_thread(self._write_meta, step)
        await self.context.bell.ring()
        if self.keeper is None or oldest_kept_step < 1:
            return 1
        cursor = (await self.ledger.get(oldest_kept_step)).cursor
        floor = min((g.log_sequence for g in cursor.pending), default=cursor.log_sequence + 1)
        await self.context.broker.purge_below(self.context.names.experiences_stream, floor)
        if self.feeder is not None and cursor.consumed_ordinal < self.feeder.fed:
            await self.context.broker.purge_below(self.context.names.tasks_stream, cursor.consumed_ordinal + 1)
        return oldest_kept_step + 1

    def _write_meta(self, step: int) -> None:
        """explorer_meta.json, for people: where exploration is at a checkpoint. The truth is in the streams."""
        if self.feeder is not None and self._tasks is not None:
            epoch, position = divmod(self.feeder.position, self._tasks.rows)
            names = [source.taskset.name for source in self._tasks.sources]
            value = {"latest_iteration": step, "tasks_fed": self.feeder.fed, "epoch": epoch, "position": position,
                     "tasksets": names}  # fmt: skip
            files.write_json(self.context.plan.job_dir / "explorer_meta.json", value)

    @property
    def finished(self) -> bool:
        """The last step is committed and every evaluation has ended."""
        done = 0 < self.context.last_step <= self.context.committed_step
        return done and (self.evaluator is None or self.evaluator.idle)
