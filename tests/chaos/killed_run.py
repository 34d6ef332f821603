"""A run on real parts whose processes are killed with -9 at seeded moments, and the audit of what it left.

start -> strike(...) ... -> finish -> audited. A moment is a phase of the run and a delay after it began:

    start       the process that dies is there, started just now if it died before: it may not be ready yet
    waiting     the trainer waits for a batch; if it has not done so for two steps, they count as `step`
    step        the trainer has noted a step: it publishes, saves or learns the next one
    checkpoint  the folder of a checkpoint is there under its temporary name
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.checks.audit import Findings, TrainerRecord, audit, read
from support.programs.run import Status, TrinityRun, write_config
from support.servers.nats import NatsServer
from trinity.reading.job import ProcessRecord, read_records
from trinity.runtime import names
from trinity.runtime.broker import connect
from trinity.runtime.process import is_alive

GROUPS, REPEAT, SAVE_INTERVAL = 8, 2, 3
PHASES = ("start", "waiting", "step", "checkpoint")
# Steps that a run needs for each kill: to recover from the previous one, and to reach the phase.
STEPS_PER_KILL = 5

_STARTUP_SECONDS = {"buffer": 3.0, "nats": 0.3, "sync": 2.0, "environment": 2.0, "explorer": 25.0, "trainer": 10.0}
_DELAY_SECONDS = {"waiting": 0.5, "step": 0.7, "checkpoint": 0.2}
# Generous, for machines that do other things besides.
_LIMIT_SECONDS = 240.0


@dataclass(frozen=True)
class Moment:
    phase: str
    delay_seconds: float


def moment(rng: random.Random, victims: Sequence[str], phase: str) -> Moment:
    """A random moment of the phase for these to die."""
    longest = _DELAY_SECONDS.get(phase) or max(_STARTUP_SECONDS[victim] for victim in victims)
    return Moment(phase, rng.uniform(0.0, longest))


class ChaosRun(TrinityRun):
    """A run that records its trainer's and its buffer's reports."""

    def __init__(self, repository: Path, folder: Path, model: Path, data: Path, steps: int, ahead: int = 1) -> None:
        """`ahead`: steps that exploration may run ahead of training; 0: they take turns, and the trainer waits."""
        folder.mkdir(parents=True, exist_ok=True)
        changes = {
            "name": "chaos",
            "model": {"max_response_tokens": 16},
            "buffer": {"batch_size": GROUPS, "total_steps": steps, "explorer_input": {"eval_tasksets": []}},
            "algorithm": {"repeat_times": REPEAT},
            "synchronizer": {"sync_interval": 1, "sync_offset": ahead},
            "trainer": {"save_interval": SAVE_INTERVAL, "max_checkpoints_to_keep": 3},
            "stages": [],
        }
        config = write_config(repository / "examples/quickstart/arithmetic.yaml", folder / "chaos.yaml", changes)
        environment = {"TRINITY_MODEL_PATH": str(model), "TRINITY_TASKSET_PATH": str(data)}
        # Explorers log every acknowledged group at this level.
        super().__init__(config, folder, TRINITY_LOG_LEVEL="DEBUG", **environment)
        self.steps = steps
        self.record = TrainerRecord(self.job / "monitor/batches.jsonl")
        self.counts: list[Mapping[str, int]] = []

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def poll_status(self) -> Status | None:
        try:
            status = super().poll_status()
        except RuntimeError:  # it removed its record during the call
            status = None
        self.record.read()
        if status is not None and status["groups"] is not None:
            self.counts.append(status["groups"])
        return status

    def finish(self, seconds: float) -> int:
        code = super().finish(seconds)
        self.record.read()
        return code

    def strike(self, victims: Sequence[str], when: Moment) -> str:
        """kill -9 of all victims at that moment, and wait until others are in their place.

        Returns the phase; empty if the run ended before, and nothing was killed.
        """
        phase = self._reach(victims, when.phase)
        time.sleep(when.delay_seconds)
        pids = {victim: process.pid for victim in victims if (process := self._process_of(victim)) is not None}
        if not phase or self.has_ended or len(pids) < len(victims):
            return ""
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):  # it died by itself, of the one before
                os.kill(pid, signal.SIGKILL)
        self._wait(lambda: all(self._is_another(v, pid) for v, pid in pids.items()), "they are back")
        return phase

    def resumes(self, victims: Sequence[str]) -> bool:
        """Wait until all victims serve and the trainer has noted another step. False if the run ended meanwhile."""
        self.record.read()
        noted = len(self.record.lines)

        def holds() -> bool:
            status = self.poll_status()
            return len(self.record.lines) > noted and status is not None and all(is_up(status, v) for v in victims)

        return self._wait(holds, f"{' and '.join(victims)} are up and the run continues", pause_seconds=0.25)

    def wait_until_noted(self, step: int) -> None:
        """Wait until the trainer has recorded the step."""

        def holds() -> bool:
            self.record.read()
            return step in self.record.said

        assert self._wait(holds, f"step {step}"), f"the run ended before step {step}: {self.tail()}"

    def audited(self) -> Findings:
        """Findings of a run that ended by itself. Its nats-server is started again on its store."""
        server = NatsServer(self.job / "nats", users=self.job / "identity" / "nats")
        server.start()
        try:
            return asyncio.run(self._audit(server))
        finally:
            server.stop()

    async def _audit(self, server: NatsServer) -> Findings:
        run = names.run_id("quickstart", "chaos")
        async with asyncio.timeout(120), await connect(server.url, "audit", creds=server.admin()) as broker:
            records = await read(broker, run, self.job, self.record.said, self.counts)
        return audit(records, self.steps, GROUPS)

    def _reach(self, victims: Sequence[str], phase: str) -> str:
        """Wait for the phase. Returns it; empty if the run ended before."""
        if phase == "start":
            there = self._wait(lambda: all(self._process_of(v) is not None for v in victims), "they are started")
        elif not self.resumes(victims):
            there = False
        elif phase == "waiting":
            return self._reach_waiting()
        elif phase == "checkpoint":
            begin = time.time()
            there = self._wait(lambda: self._saves_since(begin), "a checkpoint is written")
        else:
            noted = len(self.record.lines)
            there = self._wait(lambda: self._noted_more(noted), "another step")
        return phase if there else ""

    def _reach_waiting(self) -> str:
        noted = len(self.record.lines)
        state = ""

        def holds() -> bool:
            nonlocal state
            status = self.poll_status()
            state = status["trainer_state"] if status is not None else ""
            return state == "waiting" or len(self.record.lines) > noted + 2

        if not self._wait(holds, "the trainer waits", pause_seconds=0.05):
            return ""
        return "waiting" if state == "waiting" else "step"

    def _saves_since(self, begin: float) -> bool:
        """Returns True if a checkpoint was begun since then. Torn checkpoints of earlier kills do not count."""
        changed = []
        for folder in self.job.glob(".global_step_*.partial"):
            with contextlib.suppress(FileNotFoundError):
                changed.append(folder.stat().st_ctime)
        return any(at >= begin for at in changed)

    def _noted_more(self, noted: int) -> bool:
        self.record.read()
        return len(self.record.lines) > noted

    def _wait(self, holds: Callable[[], Any], what: str, pause_seconds: float = 0.01) -> bool:
        """False if the run ended before. Fails after the limit."""
        deadline = time.monotonic() + _LIMIT_SECONDS
        while time.monotonic() < deadline:
            if holds():
                return True
            if self.has_ended:
                return False
            time.sleep(pause_seconds)
        raise AssertionError(f"not within {_LIMIT_SECONDS:g} s: {what}; {self.tail()}")

    def _process_of(self, name: str) -> ProcessRecord | None:
        """The record of a living process, else None."""
        record = read_records(self.job).get("main")
        processes = record.processes if record is not None else []
        return next((p for p in processes if p.name == name and is_alive(p.pid)), None)

    def _is_another(self, name: str, pid: int) -> bool:
        process = self._process_of(name)
        return process is not None and process.pid != pid


def is_up(status: Status, name: str) -> bool:
    return any(p["name"] == name and p["health"] == "SERVING" for p in status["processes"])
