"""An explorer that joined a run tells a run that finished from one that is away."""

import asyncio
import errno
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from trinity.config import Config
from trinity.modes import join
from trinity.reading.job import Job, ProcessRecord, SupervisorRecord, read_records
from trinity.reading.nats import NatsAccess
from trinity.runtime import files
from trinity.runtime.errors import Unavailable

pytestmark = pytest.mark.core


class SilentBuffer:
    """A watcher whose buffer does not answer any more, and has not said before that the run is finished."""

    class view:
        buffer = None
        finished = False

    async def refresh(self) -> Any:
        return self.view


class Child:
    name, service = "extra", "explorer"
    waits, start_seconds, finished = "", 0.0, False

    def record(self) -> ProcessRecord:
        return ProcessRecord("extra", "explorer", 1, "")


class Display:
    def show(self, *_: Any) -> None: ...


def refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def until_run_ends(job: Job, monkeypatch: pytest.MonkeyPatch) -> bool:
    """On a disk that is full."""
    monkeypatch.setattr(join, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(files, "write_json", refuse)
    running: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    nats = NatsAccess("nats://127.0.0.1:1")
    child, watcher, display = Child(), SilentBuffer(), Display()
    return await join.until_run_ends(
        running, child, job, "explorer-extra", "run", nats, watcher, display, asyncio.Event()
    )


@pytest.mark.parametrize(("written", "finished"), [(None, False), (-60, False), (60, True)], ids=str)
async def test_a_summary_of_this_run_says_that_it_finished(
    written: float | None, finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer of a finished run may end before it is asked once more; an older summary is of an earlier run."""
    job = Job(Config.model_validate({"project": "p", "name": "n", "checkpoint_root_dir": str(tmp_path)}))
    job.folder.mkdir(parents=True, exist_ok=True)
    if written is not None:
        summary = job.folder / "summary.json"
        summary.write_text(json.dumps({"steps": 1}))
        at = summary.stat().st_mtime + written
        os.utime(summary, (at, at))
    assert await until_run_ends(job, monkeypatch) is finished
    job.remove_record("explorer-extra")


@pytest.mark.parametrize(
    ("host", "url", "found"),
    [
        ("node7", "nats://10.0.0.7:4222", True),
        ("node7", "nats://127.0.0.1:4222", False),  # of that machine alone
        (socket.gethostname(), "nats://10.0.0.7:4222", False),  # this machine's, and it has ended
    ],
)
def test_a_shared_job_folder_names_the_nats_of_a_run_on_another_machine(
    host: str, url: str, found: bool, tmp_path: Path
) -> None:
    job = Job(Config.model_validate({"project": "p", "name": "n", "checkpoint_root_dir": str(tmp_path)}))
    process = ProcessRecord("one", "explorer", os.getpid(), "", gpus=["0"])
    pid = os.getppid() if host == "node7" else 2**22 + 1  # there is a process of this number here
    job.write_record("main", SupervisorRecord(pid, "train", "run", "", url, [process], "/users", host))
    assert read_records(job.folder) == {}
    assert job.taken_gpus() == set()
    main = job.elsewhere()
    assert (main.nats() if main is not None else None) == (NatsAccess(url, Path("/users")) if found else None)


async def test_an_explorer_looks_for_its_run_on_that_nats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(Config.model_validate({"project": "p", "name": "n", "checkpoint_root_dir": str(tmp_path)}))
    record = SupervisorRecord(os.getppid(), "train", "run", "", "nats://10.0.0.7:4222", [], "/users", "node7")
    job.write_record("main", record)
    asked: list[NatsAccess] = []

    async def connect(self: NatsAccess, *_: Any, **__: Any) -> Any:
        asked.append(self)
        raise Unavailable("it has ended")

    monkeypatch.delenv("TRINITY_NATS_URL", raising=False)
    monkeypatch.setattr(NatsAccess, "connect", connect)
    assert (await join.look_for_run(job))[1] is None
    assert asked == [NatsAccess("nats://10.0.0.7:4222", Path("/users"))]
