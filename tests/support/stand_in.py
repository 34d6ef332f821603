"""A run in mode train, and the explorer beside it: real but for its engine, which is transformers instead of vLLM.

run.start() -> with StandIn(run): run.finish(...)
"""

import time
from pathlib import Path

from support.member_process import MemberProcess
from support.run import TrinityRun
from support.torch_engine import ENGINE
from trinity.cli.job import SupervisorRecord, read_records


class StandIn:
    """A context manager. The explorer begins when the run has written where its services are."""

    def __init__(self, run: TrinityRun, seconds: float = 60, **settings: str) -> None:
        self.log = run.folder / "explorer.log"
        record = _record(run, seconds)
        addresses = {process.service: process.address for process in record.processes}
        self._process = MemberProcess(
            "stand-in",
            run.folder / "stand-in",
            {},
            ENGINE,
            config_file=_config_file(run),
            nats_url=record.nats_url,
            sync_address=addresses["sync"],
            environment_address=addresses["environment"],
            log_file=self.log,
            **settings,
        )

    def __enter__(self) -> "StandIn":
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()


def _record(run: TrinityRun, seconds: float) -> SupervisorRecord:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        record = read_records(run.job).get("main")
        if record is not None and any(process.service == "sync" for process in record.processes):
            return record
        time.sleep(0.05)
    raise AssertionError(f"no sync service within {seconds:g} s: {run.tail()}")


def _config_file(run: TrinityRun) -> Path:
    """With everything that the run has filled in."""
    return run.job / "config.json"
