"""An explorer that joined a run tells a run that finished from one that is away."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from trinity.cli.supervise import join
from trinity.cli.supervise.job import Job
from trinity.config import Config

pytestmark = pytest.mark.core


class SilentBuffer:
    """A watcher whose buffer does not answer any more, and has not said before that the run is finished."""

    class view:
        buffer = None
        finished = False

    async def refresh(self) -> Any:
        return self.view


class Child:
    name = "extra"

    def record(self) -> Any:
        return None


class Display:
    def show(self, *_: Any) -> None: ...


async def until_run_ends(job: Job, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(join, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(Job, "write_record", lambda *_: None)
    running: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    parts: list[Any] = [running, Child(), job, "explorer-extra", "run", "", SilentBuffer(), Display()]
    return await join._until_run_ends(*parts, asyncio.Event())


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
