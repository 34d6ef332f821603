"""Files in the job folder: JSON lines, and TensorBoard's event files. Both are flushed with every call."""

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trinity.runtime.files import end_last_line, keep_newest_lines
from trinity.runtime.monitor.options import MonitorOptions


class Lines:
    """`{"step": ..., "time": ..., name: value}` per call, null for NaN and infinity.

    A step trained again after a crash is noted again: the last line counts. Above `most_bytes` the older half goes.
    """

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self._path = path
        self._most_bytes = most_bytes
        end_last_line(path)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, "time": time.time(), **numbers}, allow_nan=False)
        with self._path.open("a") as lines:
            lines.write(line + "\n")
        keep_newest_lines(self._path, self._most_bytes)

    def close(self) -> None:
        pass


_PARTS = 4


class TensorboardFiles:
    """<folder>/tensorboard/<role>/events*, a new file with every start, and for every quarter of `options.most_bytes`.

    Above `most_bytes` the oldest files go.

    The file begins with a START of step `first_step` + 1: TensorBoard then forgets the points from there on, which an
    earlier process wrote. That is what SummaryWriter's `purge_step` does; SummaryWriter itself is not used, because it
    writes from a thread: that loses two minutes in a crash, and with a full disk the thread ends and every call hangs.
    """

    def __init__(self, options: MonitorOptions, first_step: int) -> None:
        with _torch_hidden():
            from tensorboardX import event_file_writer, summary
            from tensorboardX.proto import event_pb2, summary_pb2
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._folder = options.folder / "tensorboard" / options.role
        self._folder.mkdir(parents=True, exist_ok=True)
        self._most_bytes = options.most_bytes
        self._open = event_file_writer.EventsWriter
        self._begin()
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(first_step + 1, session_log=start)
        config = json.dumps(options.public_config(), indent=1)
        self._write(first_step, summary=summary.text("config", f"```json\n{config}\n```"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step, summary=self._summary(value=values))

    def close(self) -> None:
        self._writer.close()

    def _begin(self) -> None:
        # File names have whole seconds; two starts in one second must not write the same file.
        self._writer = self._open(str(self._folder / "events"), f".{time.time_ns() % 10**9:09d}")
        self._written = 0

    def _write(self, step: int, **content: Any) -> None:
        event = self._event(wall_time=time.time(), step=step, **content)
        self._writer.write_event(event)
        self._writer.flush()
        self._written += event.ByteSize()
        if self._most_bytes is not None and self._written > self._most_bytes / _PARTS:
            self._writer.close()
            self._begin()
            self._remove_oldest(self._most_bytes)

    def _remove_oldest(self, most_bytes: int) -> None:
        files = sorted(self._folder.glob("events*"), key=lambda file: file.stat().st_mtime_ns)
        sizes = [file.stat().st_size for file in files]
        for index, file in enumerate(files[:-1]):
            if sum(sizes[index:]) > most_bytes * (1 - 1 / _PARTS):
                file.unlink()


@contextmanager
def _torch_hidden() -> Iterator[None]:
    """Hides torch from tensorboardX, which would import it: 4 seconds and 200 MB that a buffer does not need."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's way to say: not installed
    try:
        yield
    finally:
        del sys.modules["torch"]
