"""One run in the buffer: its parts, and how they are wired."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable
from dataclasses import asdict
from typing import Any, TypeVar

import structlog

from trinity.buffer.evaluation.evaluator import EVALUATIONS, Evaluator
from trinity.buffer.hooks import hook
from trinity.buffer.ledger import fork
from trinity.buffer.ledger.auxiliary import Auxiliary
from trinity.buffer.ledger.batches import BatchServer
from trinity.buffer.ledger.entries import Ledger
from trinity.buffer.ledger.fences import Fences
from trinity.buffer.ledger.offline import OfflineSource
from trinity.buffer.ledger.retention import Retention
from trinity.buffer.ledger.wire import Entry
from trinity.buffer.ledger.writer import LedgerWriter
from trinity.buffer.log.dead_letters import DeadLetters
from trinity.buffer.log.reader import EntryValidator, LogReader
from trinity.buffer.operators.pipeline import Pipeline
from trinity.buffer.report import Reporter
from trinity.buffer.settings import BufferSettings
from trinity.buffer.state.commit import CommitRecord
from trinity.buffer.state.context import LiveVersions, Origin, RunContext
from trinity.buffer.state.streams import StoreCut
from trinity.buffer.tasks.feeder import Feeder
from trinity.buffer.window.window import Window
from trinity.config.checks.vision import archives
from trinity.config.parents import parent_of
from trinity.config.plan import Plan
from trinity.config.service import monitor_fields
from trinity.data.experience import TaskKind
from trinity.data.selectors import DifficultyBased
from trinity.data.task_source import TaskMixture, TaskSource
from trinity.runtime import files
from trinity.runtime.broker import Bucket, PublishRefused, return_undelivered
from trinity.runtime.errors import Conflict, DataLoss, Full, NotFound, Unavailable
from trinity.runtime.metrics import Counter
from trinity.runtime.monitor import MonitorOptions, open_monitor
from trinity.runtime.names import TASKS_CONSUMER

log = structlog.get_logger(__name__)

OFFERED_AGAIN = Counter("trinity_buffer_tasks_unreported_total", "Tasks acknowledged without a result, offered again")

ORIGIN = "origin"  # field of the commit record
_LOOKS = 6
_Task = TypeVar("_Task", bound=Hashable)


class Run:
    """open -> run for ever. All state is rebuilt from NATS."""

    def __init__(self, context: RunContext, versions: Bucket, runs: Bucket, settings: BufferSettings) -> None:
        plan: Plan = context.plan
        self.context = context
        self.ledger = Ledger(context)
        self._versions = LiveVersions(context, versions)
        self._record = CommitRecord(context, runs)
        self._unreported_seconds = settings.unreported_seconds
        self.reader = LogReader(context, settings.cache_mib * 2**20)
        self.writer: LedgerWriter | None = None
        self.fences: Fences | None = None
        self.feeder: Feeder | None = None
        self.rewarded: Any = None  # of trinity-traffic, if the run learns from live traffic
        self.evaluator: Evaluator | None = None
        self.offline: OfflineSource | None = None
        self.retention: Retention | None = None
        self._tasks: TaskMixture | None = None
        auxiliary = Auxiliary(plan)
        trains = plan.config.mode in ("both", "train")
        if plan.offline:
            self.offline = OfflineSource(context, self.ledger, plan.experience_buffer)
            context.last_step = plan.steps_for(len(self.offline))
        elif trains:
            sources = [TaskSource.open(context.run, plan, t, TaskKind.TRAIN) for t in plan.tasksets]
            self._tasks = TaskMixture(sources)
            context.last_step = plan.steps_for(self._tasks.rows)
        self._reporter = reporter = Reporter(plan, self._tasks)
        if not plan.offline:
            if self._tasks is not None:
                self._build_writer(self._tasks, auxiliary, settings)
            evaluated = [TaskSource.open(context.run, plan, t, TaskKind.EVALUATION) for t in plan.eval_tasksets]
            self.evaluator = Evaluator(context, evaluated, self._record, reporter.evaluated)
        self.letters = DeadLetters(context, lambda o: self.writer is not None and o in self.writer.window.dead,
                                   lambda: self.feeder.left() if self.feeder is not None else 0)  # fmt: skip
        self.batches = BatchServer(context, self.ledger, self.reader, self.writer, self.offline, auxiliary)

    def _build_writer(self, tasks: TaskMixture, auxiliary: Auxiliary, settings: BufferSettings) -> None:
        """Builds the parts of a run with explorers, which read and write the same log."""
        context, operators = self.context, self.context.plan.config.data_processor.experience_pipeline.operators
        if context.plan.config.explorer.traffic is not None:
            traffic = hook("traffic", "explorer.traffic")
            self.rewarded = traffic.rewarded(context, self._versions, settings.sync_address)
        feeder = Feeder(context, tasks, lambda: writer.window, self.ledger.task_ids, self.rewarded)
        pipeline = Pipeline(operators)
        validator = EntryValidator(context, self.reader, pipeline, feeder.task, self._versions)
        self._reporter.pipeline = pipeline
        writer = LedgerWriter(context, self.ledger, validator, auxiliary, self._reporter)
        given = archives(context.plan.config)
        mirrors = hook("archive", given[0]).open_mirrors(context, self.reader) if given else []
        self.writer, self.feeder, self.fences = writer, feeder, Fences(context, writer)
        keep_bytes = int(settings.log_keep_gib * 2**30)
        self.retention = Retention(
            context, self.ledger, writer, feeder, mirrors, keep_bytes, settings.nats_replicas,
            lambda: self.evaluator.blob_bytes if self.evaluator is not None else 0,
        )  # fmt: skip

    async def open(self) -> None:
        """Reads how far the run came."""
        await self.ledger.open()
        kept = await self._fork(await self._record.read())
        fields = monitor_fields(self.context.plan, "explorer")
        if self.offline is not None:  # nothing is explored
            fields["kind"] = "none"
        self._reporter.monitor = await asyncio.to_thread(
            open_monitor, MonitorOptions(**fields), self.ledger.newest_step
        )
        self.context.committed_step, oldest_kept_step = _committed(kept)
        await self._versions.look()
        if self.writer is not None and self.feeder is not None and self.retention is not None:
            await self.writer.recover()
            await self.feeder.recover()
            self._check_store(self.writer.window)
            await self.retention.open(oldest_kept_step)
            await self._remind_selectors()
            await self.feeder.feed_left_out()
        if self.evaluator is not None:
            await self.evaluator.recover(kept.get(EVALUATIONS))

    async def _fork(self, kept: dict[str, Any]) -> dict[str, Any]:
        """Begins the ledger and the log of a fork, once. Returns the record with what it then says."""
        parent = parent_of(self.context.plan.job_dir)
        if ORIGIN not in kept and parent is not None:
            origin = await fork.begin(self.context, self.ledger, self._tasks, parent)
            changes = {ORIGIN: asdict(origin), "step": parent.step, "oldest_kept_step": parent.step}
            await self._record.write(**changes)
            kept = {**kept, **changes}
        if ORIGIN in kept:
            self.context.origin = Origin(**kept[ORIGIN])
        return kept

    def _check_store(self, window: Window) -> None:
        """Raises StoreCut if the ledger is older than a checkpoint, or the queue older than the ledger.

        Comes before the log is read: good groups would be refused.
        """
        run, ledger, committed = self.context.run, self.ledger.newest_step, self.context.committed_step
        if committed > ledger:
            raise StoreCut(
                f"run {run}: the newest checkpoint is of step {committed}, but the ledger ends at step {ledger}: NATS "
                "has lost ledger entries; restore its store, or begin another run"
            )
        ended = max(window.ended, default=window.ended_through)
        if ended > self.context.fed:
            raise StoreCut(
                f"run {run}: task {ended} has ended by step {ledger} of the ledger, but the queue was fed only "
                f"{self.context.fed}: NATS has lost tasks; restore its store, or begin another run"
            )

    async def _remind_selectors(self) -> None:
        """Tells selectors that learn the rewards of earlier groups, and which tasks have no result yet."""
        assert self._tasks is not None and self.writer is not None and self.feeder is not None
        if not any(isinstance(source.selector, DifficultyBased) for source in self._tasks.sources):
            return
        for step in range(1, self.ledger.newest_step + 1):
            entry = await self.ledger.get(step)
            for member in entry.groups:
                self._tasks.observe(member.task_id, member.reward_mean)
            for cut in entry.cut:
                self._tasks.observe(cut.task_id, None)
        window = self.writer.window
        for group in window.unused.values():
            self._tasks.observe(group.task_id, group.reward_mean)
        for ordinal in window.outstanding(self.feeder.fed):
            with contextlib.suppress(NotFound):  # dead tasks are not in the queue any more
                self._tasks.observe((await self.feeder.task(ordinal)).fields.task_id, None)

    async def run(self) -> None:
        """Runs until a part fails; a part that merely ends has failed, too."""
        loops = [self._versions.follow()]
        if self.offline is not None:
            loops.append(self.offline.run())
        if self.writer and self.feeder and self.retention and self.fences:
            loops += [self.writer.run(), self.feeder.run(), self.feeder.clear(), self.retention.run()]
            loops += [self.rewarded.follow()] if self.rewarded is not None else []
            loops += [self.fences.run(), self._offer_unreported(self.writer, self.feeder)]
            loops.append(return_undelivered(self.context.broker, self.context.names.tasks_stream, TASKS_CONSUMER))
        if self.evaluator:
            loops += [self.evaluator.feed(), self.evaluator.collect(), self._offer_unevaluated(self.evaluator)]
            queue = self.context.names.evaluation_tasks_stream
            loops.append(return_undelivered(self.context.broker, queue, TASKS_CONSUMER))
        try:
            async with asyncio.TaskGroup() as group:
                for loop in loops:
                    group.create_task(loop)
        except* PublishRefused as refused:
            fix = "raise TRINITY_BUFFER_LOG_GIB, of which each stream has a part, or make room on the disk of NATS"
            first: BaseException = refused
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise Full(f"{first}; {fix}") from None
        finally:
            if self._reporter.monitor is not None:
                self._reporter.monitor.close()

    def _offer_unreported(self, writer: LedgerWriter, feeder: Feeder) -> Coroutine[Any, Any, None]:
        names = self.context.names
        return offer_unreported(
            self.context, self._unreported_seconds, names.tasks_stream, names.experiences_stream,
            lambda: writer.window.log_sequence, feeder.outstanding, feeder.offer_again,
        )  # fmt: skip

    def _offer_unevaluated(self, evaluator: Evaluator) -> Coroutine[Any, Any, None]:
        names = self.context.names
        return offer_unreported(
            self.context, self._unreported_seconds, names.evaluation_tasks_stream, names.evaluations_stream,
            lambda: evaluator.read_through, evaluator.unreported, evaluator.offer_again,
        )  # fmt: skip

    async def rewind(self, step: int) -> None:
        """The trainer continues after `step`. DataLoss unless every later entry can still be served."""
        newest = self.ledger.newest_step
        if step > newest:
            raise DataLoss(
                f"step: the trainer's checkpoint is of step {step}, but the ledger ends at step {newest}; "
                "the job folder and this NATS do not belong together"
            )
        if step == newest or self.offline is not None:
            return
        first = (await self.context.broker.state(self.context.names.experiences_stream)).first_sequence
        for later in range(step + 1, newest + 1):
            entry = await self.ledger.get(later)
            if any(group.log_sequence < first for group in entry.groups):
                raise DataLoss(f"step: experience of step {later} was released; continue from a newer checkpoint")
            if entry.floor_sequence >= first:
                return  # what later steps use lies above

    async def commit(self, step: int, oldest_kept_step: int) -> int:
        """A checkpoint is durable: release what no kept one can ask for. Returns the lowest step still served."""
        await self._record.write(step=step, oldest_kept_step=oldest_kept_step)
        self.context.committed_step = step
        await asyncio.to_thread(self._write_meta, step)
        await self.context.changed.notify()
        if self.retention is None:
            return 1
        return await self.retention.released(oldest_kept_step) + 1

    async def skip(self, step: int, reason: str) -> Entry:
        """The entry of a step that the trainer passes from now on. Conflict if it is too late for that."""
        if step <= self.context.committed_step:
            held = f"a checkpoint of step {self.context.committed_step} holds it"
            raise Conflict(f"step: {step} cannot be skipped, {held}; roll back, or begin from an older checkpoint")
        async with self.ledger.skipping:
            if self.batches.is_read(step):
                problem = f"step: {step} is being read by a trainer; end the run, skip the step, and start it again"
                raise Conflict(problem)
            return await self.ledger.skip(step, reason)

    async def fence(self, versions: Iterable[int]) -> int:
        """Keep what these versions sampled out of later batches. Returns the groups that fences have dropped so far."""
        return await self.fences.fence(versions) if self.fences is not None else 0

    def _write_meta(self, step: int) -> None:
        """Writes explorer_meta.json, for people only: the progress of exploration at a checkpoint."""
        if self.feeder is not None and self._tasks is not None:
            epoch, position = divmod(self.feeder.position, self._tasks.rows or 1)
            names = [source.taskset.name for source in self._tasks.sources]
            value = {"latest_iteration": step, "tasks_fed": self.feeder.fed, "epoch": epoch, "position": position,
                     "tasksets": names}  # fmt: skip
            files.write_json(self.context.plan.job_dir / "explorer_meta.json", value)

    @property
    def finished(self) -> bool:
        """The last step is committed and every evaluation has ended."""
        done = 0 < self.context.last_step <= self.context.committed_step
        return done and (self.evaluator is None or self.evaluator.idle)


async def offer_unreported(
    context: RunContext,
    seconds: float,
    tasks_stream: str,
    results_stream: str,
    read_through: Callable[[], int],
    outstanding: Callable[[], Iterable[_Task]],
    offer_again: Callable[[_Task], Awaitable[None]],
) -> None:
    """Offers outstanding tasks again, for ever, once no explorer had them for `seconds`.

    An explorer acknowledges a task when its result is in the log. An earlier acknowledgement, by a fault or on purpose,
    removes the task from the queue, and the run would wait for it for ever. NATS does not name the explorer. Such a
    task is found when the queue is empty, no task is leased, and the whole log is read. The log drops a second result.
    """
    looks: dict[_Task, int] = {}
    while True:
        await asyncio.sleep(seconds / _LOOKS)
        fed = set(outstanding())  # before the look at the queue, which then holds later tasks
        broker = context.broker
        with contextlib.suppress(NotFound, Unavailable):  # repeated later
            queue = await broker.consumer(tasks_stream, TASKS_CONSUMER)
            newest = (await broker.state(results_stream)).last_sequence
            is_idle = not queue.queued and not queue.leased and read_through() >= newest
            lost = fed.intersection(outstanding()) if is_idle else set()
            looks = {task: looks.get(task, 0) + 1 for task in lost}
            for task in [task for task, count in looks.items() if count >= _LOOKS]:
                await offer_again(task)
                del looks[task]
                OFFERED_AGAIN.inc()
                log.warning("buffer.task.unreported", task=str(task), reason="acknowledged without a result")


def _committed(fields: dict[str, Any]) -> tuple[int, int]:
    """The step of the newest checkpoint and of the oldest kept one, as `Run.commit` wrote them; zeros if it did not."""
    try:
        step, oldest = int(fields["step"]), int(fields["oldest_kept_step"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return 0, 0  # nothing is released before the next checkpoint
    return (step, oldest) if 0 <= oldest <= step else (0, 0)
