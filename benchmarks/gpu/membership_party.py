"""The explorers of membership.py. Each is a separate `trinity run` that starts, leaves by SIGTERM, or is killed."""

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import whole_run

from support.programs.run import Status, TrinityRun, process_of
from trinity.api.explorer.v1 import explorer_pb2, explorer_pb2_grpc
from trinity.runtime.names import run_id
from trinity.runtime.trust.nats_users import user_file
from trinity.runtime.trust.roles import Role
from trinity.weights.wire import ExplorerState

COLLECTIVE_SECONDS = 10.0
START_SECONDS, EVENT_SECONDS = 240.0, 120.0


@dataclass
class Event:
    """An event, its time and its duration (of a start until the first stored group, of a leave until the end)."""

    what: str
    at: float
    seconds: float | None = None


@dataclass
class Explorer:
    """`trinity run` with mode explore, in a separate job folder, as on another machine."""

    name: str
    run: TrinityRun
    started_at: float = 0.0

    @property
    def log_folder(self) -> Path:
        return self.run.job / "log"

    def first_group(self) -> float | None:
        """Unix time of its first acknowledged group since it was started."""
        stored = whole_run.events(self.run.job, self.name, "explorer.group.stored")
        return next((event["at"] for event in stored if event["at"] > self.started_at), None)

    def process(self) -> dict[str, Any]:
        status = self.run.poll_status()
        assert status is not None, self.run.tail()
        return process_of(status, self.name)

    def kill(self) -> None:
        """kill -9 of the explorer and of the supervisor that would restart it."""
        os.kill(self.process()["pid"], signal.SIGKILL)
        self.run.kill()


@dataclass
class Party:
    """The run, its explorers, and the events."""

    args: argparse.Namespace
    folder: Path
    main: TrinityRun
    explorers: dict[str, Explorer] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    cards: list[str] = field(default_factory=list)

    def start(self, name: str) -> Explorer:
        """A new process for the explorer of that name."""
        if name not in self.explorers:
            self.explorers[name] = Explorer(name, self._run_of(name))
        explorer = self.explorers[name]
        explorer.started_at = time.time()
        explorer.run.start()
        return explorer

    def _run_of(self, name: str) -> TrinityRun:
        number = len(self.explorers)
        shared = len(self.cards) == 1
        rollout = {"enforce_eager": True, "gpu_memory_utilization": 0.25 if shared else 0.8, "cpu_kvcache_gib": 0.25}
        values = {
            "project": "benchmark", "name": "membership", "mode": "explore",
            "model": {"model_path": str(self.folder / self.args.size)},
            "checkpoint_root_dir": str(self.folder / name / "jobs"),
            "explorer": {"name": name, "runner_per_model": self.args.tasks, "rollout_model": rollout},
        }  # fmt: skip
        config = whole_run.write_yaml(self.folder / f"{name}.yaml", values)
        card = self.cards[number % len(self.cards)] if self.cards else ""
        transports = "folder" if shared and number else "collective,folder"
        status = self.main.poll_status()
        assert status is not None, self.main.tail()
        run, users = run_id("benchmark", "membership"), self.main.job / "identity" / "nats"
        given = {
            "TRINITY_NATS_URL": status["nats_url"], "TRINITY_LOG_LEVEL": "DEBUG",
            "TRINITY_NATS_CREDS": str(user_file(users, Role.EXPLORER, name, run)),
            "TRINITY_IDENTITY_FOLDER": str(self.main.job / "identity"),
            "TRINITY_EXPLORER_TRANSPORTS": transports, "CUDA_VISIBLE_DEVICES": card,
        }  # fmt: skip
        place = self.folder / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return TrinityRun(config, place, **given, **threads(self.args))

    def note(self, what: str, at: float, seconds: float | None = None) -> None:
        """Record an event for the table, and print it."""
        self.events.append(Event(what, at, seconds))
        took = f" ({seconds:.1f} s)" if seconds is not None else ""
        print(f"{time.strftime('%H:%M:%S')} {what}{took}", file=sys.stderr, flush=True)

    def joined(self, *explorers: Explorer) -> None:
        """Wait until each explorer has stored a group, and note its seconds since the start."""
        for explorer in explorers:
            first = self.until(explorer.first_group, START_SECONDS, f"{explorer.name} stores a group")
            self.note(f"{explorer.name} joins", explorer.started_at, first - explorer.started_at)

    def until(self, holds: Callable[[], Any], seconds: float, what: str) -> Any:
        return self.main.until(lambda status: holds(), seconds, what) and holds()

    def steps(self) -> int:
        return len(whole_run.trained(self.main.job))

    def wait_for_steps(self, steps: int) -> None:
        """Wait for this number of further steps."""
        begin = self.steps()
        self.until(lambda: self.steps() >= begin + steps, EVENT_SECONDS, f"{steps} more steps")

    def leave(self, explorer: Explorer) -> None:
        """Send SIGTERM, and wait for the end."""
        begin = time.time()
        explorer.run.signal(signal.SIGTERM)
        explorer.run.finish(EVENT_SECONDS)
        self.note(f"{explorer.name} leaves by SIGTERM", begin, time.time() - begin)

    def kill(self, explorer: Explorer) -> None:
        self.note(f"{explorer.name} is killed", time.time())
        explorer.kill()

    def kill_in_collective(self, explorer: Explorer) -> None:
        """kill -9 once its engine is paused for a version sent to the group. Notes the trainer's view."""
        self.until(lambda: by_group(explorer), EVENT_SECONDS, f"{explorer.name} is in the collective group")
        process, end = explorer.process(), time.monotonic() + EVENT_SECONDS
        with self.main.channel(process["address"]) as channel:
            ask = explorer_pb2_grpc.ExplorerServiceStub(channel).Status
            while ask(explorer_pb2.StatusRequest(), timeout=5).state != ExplorerState.UPDATING:
                if time.monotonic() > end:
                    raise RuntimeError(f"{explorer.name} was not seen updating within {EVENT_SECONDS:g} s")
                time.sleep(0.0005)
            os.kill(process["pid"], signal.SIGKILL)
        at = time.time()
        explorer.run.kill()
        self.wait_for_steps(2)
        seen = [event["event"].removeprefix("trainer.") for event in _warnings(self.main.job) if event["at"] > at - 0.5]
        self.note(f"{explorer.name} is killed in a collective ({seen[0] if seen else 'it was over'})", at)

    def rest(self) -> dict[str, int]:
        """Counts of the buffer once all explorers are gone and the counts stay constant."""
        seen: list[dict[str, int]] = []

        def still(status: Status) -> bool:
            seen.append(status["groups"])
            return len(seen) > 8 and all(counts == seen[-1] for counts in seen[-8:])

        return dict(self.main.until(still, EVENT_SECONDS, "the run is at rest")["groups"])


def by_group(explorer: Explorer) -> bool:
    loads = whole_run.events(explorer.run.job, explorer.name, "explorer.weights.loaded")
    return bool(loads) and loads[-1]["transport"].startswith("collective")


def _warnings(job: Path) -> list[dict[str, Any]]:
    return whole_run.events(job, "trainer", "trainer.epoch.broken", "trainer.epoch.silent", "trainer.epoch.failed")


def threads(args: argparse.Namespace) -> dict[str, str]:
    """Lets several engines share a few cores. vLLM would bind all of them to the same cores."""
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"} if args.cpu else {}
