"""Prometheus metrics of a run: its counts, the trainer's waiting time, the run's streams in NATS."""

import asyncio
import contextlib

from trinity.buffer.run import Run
from trinity.buffer.servicer import stats_of
from trinity.runtime import metrics, names
from trinity.runtime.broker import Broker
from trinity.runtime.errors import TrinityError
from trinity.runtime.metrics import Gauge

# By their fields of StatsResponse.
_OF_STATS = {
    "stored": Gauge("trinity_buffer_groups_stored", "Tasks that ended with a stored group"),
    "outstanding": Gauge("trinity_buffer_tasks_outstanding", "Fed tasks that have not ended"),
    "dead_letters": Gauge("trinity_buffer_dead_letters", "Tasks that ended without a group"),
    "cut_tasks": Gauge("trinity_buffer_tasks_cut", "Tasks that their step did not wait for"),
    "ledger_step": Gauge("trinity_buffer_ledger_step", "The newest step that has a batch"),
    "committed_step": Gauge("trinity_buffer_committed_step", "The newest step that a checkpoint holds"),
    "last_step": Gauge("trinity_buffer_last_step", "The step at which the run ends"),
    "staleness_max": Gauge("trinity_buffer_staleness_steps", "Largest staleness of the newest batch, in steps"),
    "log_limit_bytes": Gauge("trinity_buffer_log_limit_bytes", "Bytes that the experience log may take"),
    "archive_behind": Gauge("trinity_buffer_archive_behind_entries", "Log entries that an archive does not hold yet"),
    "evaluations_outstanding": Gauge("trinity_buffer_evaluations_outstanding", "Evaluation tasks that have not ended"),
}
UNUSED = Gauge("trinity_buffer_groups_unused", "Stored groups that no batch has: the depth of the buffer")
MISSING = Gauge("trinity_buffer_groups_missing", "Groups that the next batch still waits for")
WAITING = Gauge("trinity_buffer_trainer_waiting_seconds", "Seconds that the trainer has waited for its next batch")

CONNECTED = Gauge("trinity_buffer_nats_connected", "1 while the buffer is connected to NATS")
STORAGE = Gauge("trinity_buffer_nats_storage_bytes", "Bytes in files of all streams of the NATS account")
STREAM_MESSAGES = Gauge("trinity_buffer_stream_messages", "Messages in a stream of the run", ["stream"])
STREAM_BYTES = Gauge("trinity_buffer_stream_bytes", "Bytes of a stream of the run", ["stream"])
LEASED = Gauge("trinity_buffer_tasks_leased", "Training tasks that explorers have and did not acknowledge")
QUEUED = Gauge("trinity_buffer_tasks_queued", "Training tasks that no explorer has yet")
REDELIVERED = Gauge("trinity_buffer_tasks_redelivered", "Unacknowledged training tasks that were leased before")


async def watch(run: Run) -> None:
    """Keep the gauges up to date, for ever."""
    async with asyncio.TaskGroup() as group:
        group.create_task(metrics.sample(lambda: _measure_run(run)))
        group.create_task(metrics.sample(lambda: _measure_nats(run.context.broker, run.context.names)))


async def _measure_run(run: Run) -> None:
    stats = await stats_of(run)
    for field, gauge in _OF_STATS.items():
        gauge.set(getattr(stats, field))
    if run.writer is not None:
        UNUSED.set(len(run.writer.window.unused))
        MISSING.set(run.writer.window.missing())
    WAITING.set(run.batches.waiting_seconds)
    CONNECTED.set(run.context.broker.client.is_connected)


async def _measure_nats(broker: Broker, run: names.RunNames) -> None:
    """Measures while NATS answers. Otherwise values stay as they were, and CONNECTED is 0."""
    streams = {
        "tasks": run.tasks_stream,
        "experiences": run.experiences_stream,
        "blobs": run.blobs_stream,
        "batches": run.batches_stream,
        "dead_letters": run.dead_letters_stream,
        "turns": run.turns_stream,
    }
    with contextlib.suppress(TrinityError):  # a consumer is there once an explorer was
        STORAGE.set(await broker.storage_bytes())
        for stream, name in streams.items():
            state = await broker.state(name)
            STREAM_MESSAGES.labels(stream).set(state.messages)
            STREAM_BYTES.labels(stream).set(state.bytes)
        tasks = await broker.consumer(run.tasks_stream, names.TASKS_CONSUMER)
        QUEUED.set(tasks.queued)
        LEASED.set(tasks.leased)
        REDELIVERED.set(tasks.redelivered)
