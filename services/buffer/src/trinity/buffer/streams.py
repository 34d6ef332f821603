"""The streams of a run, as code."""

from trinity.runtime.broker import StreamSpec
from trinity.runtime.names import RunNames


def stream_specs(names: RunNames, *, log_bytes: int, replicas: int) -> list[StreamSpec]:
    """What must exist on the broker. The dedupe window of the log is longer than any retry of a publish."""
    log = StreamSpec(
        names.experiences_stream,
        (names.subjects("experiences"),),
        replicas=replicas,
        max_bytes=log_bytes,
        duplicate_window_seconds=1800.0,
    )
    return [
        log,
        StreamSpec(names.tasks_stream, (names.subjects("tasks"),), replicas=replicas),
        StreamSpec(names.evaluation_tasks_stream, (names.subjects("evaluation_tasks"),), replicas=replicas),
        StreamSpec(names.evaluations_stream, (names.subjects("evaluations"),), replicas=replicas),
        StreamSpec(names.batches_stream, (names.subjects("batches"),), replicas=replicas),
        StreamSpec(names.cursors_stream, (names.subjects("cursors"),), replicas=replicas, max_messages=16),
        StreamSpec(names.dead_letters_stream, (names.subjects("deadletters"),), replicas=replicas),
        StreamSpec(names.blobs_stream, (names.subjects("blobs"),), replicas=replicas, max_bytes=log_bytes),
    ]
