"""The real training loop, DeepSpeed and publisher, as rank processes with a real sync service; batches from a script.

python -m support.programs.trainer.releases JOB.json      (one process per rank, with torchrun's variables)

An explorer without an engine judges the versions as the test decides.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from support.fakes.data.experience import make_group, make_task
from support.programs.forked import ForkedModule
from support.programs.trainer.training import BASE, start_module
from trinity.api.buffer.v1 import buffer_pb2
from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.api.sync.v1 import sync_pb2_grpc
from trinity.config import Plan, make_plan
from trinity.config.schema import Config
from trinity.data.wire import encode_outcome
from trinity.runtime import names
from trinity.trainer.data.client import RawBatch
from trinity.weights.manifest import Manifest
from trinity.weights.wire import ExplorerState, manifest_from_proto

VOCABULARY = 97
GROUPS = 4


def raw_batch(step: int) -> RawBatch:
    """The same for the same step."""
    entry = buffer_pb2.LedgerEntry(step=step, policy="fifo")
    groups = []
    for index in range(GROUPS):
        ordinal = step * 100 + index
        group = make_group(make_task(ordinal))
        experiences = tuple(
            replace(e, token_ids=e.token_ids % VOCABULARY, reward=float(i % 2)) for i, e in enumerate(group.experiences)
        )
        outcome = encode_outcome(replace(group, experiences=experiences))
        entry.groups.append(buffer_pb2.LedgerGroup(ordinal=ordinal, log_sequence=ordinal))
        groups.append(buffer_pb2.BatchGroup(ordinal=ordinal, outcome=outcome))
    return RawBatch(entry, groups)


class ScriptedBuffer:
    """Gives the batch of a step once the number in the file `allowed` reaches it."""

    waiting_for = ""
    checkpoint_wanted = False

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder = folder
        self._steps = steps
        self._next = 0

    def rewind(self, step: int) -> buffer_pb2.RewindResponse:
        return buffer_pb2.RewindResponse(last_step=self._steps)

    def start(self, from_step: int) -> None:
        self._next = from_step

    def next(self, timeout_seconds: float) -> RawBatch | None:
        if int((self._folder / "allowed").read_text()) < self._next:
            time.sleep(timeout_seconds)
            return None
        self._next += 1
        return raw_batch(self._next - 1)

    def commit(self, step: int, oldest_kept_step: int) -> None:
        pass

    def close(self) -> None:
        pass


def main() -> None:
    import torch

    from trinity.runtime import logs
    from trinity.trainer.build import make_loop, make_publisher
    from trinity.trainer.engine import TrainEngine
    from trinity.trainer.process.control import Control
    from trinity.trainer.process.ranks import ranks_from_environment
    from trinity.trainer.settings import TrainerSettings

    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(job["folder"])
    ranks = ranks_from_environment(1)
    logs.configure("trainer", file=folder / f"log_{ranks.rank}.jsonl")
    plan = make_plan(Config.model_validate(job["config"]))
    engine, control = TrainEngine(plan, ranks, "cpu"), Control()
    settings = TrainerSettings(sync_address=job["sync"], nats_url=job["nats"])
    buffer = publisher = None
    if ranks.is_first:
        buffer = ScriptedBuffer(folder, job["steps"])
        publisher = make_publisher(plan, settings, engine)
        if job["dies_after"]:
            _die_after(publisher, job["dies_after"])
    loop = make_loop(plan, settings, ranks, engine, control, buffer, publisher)  # type: ignore[arg-type]
    error = ""
    try:
        loop.run()
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    if ranks.is_first:
        found = {"error": error, "state": control.progress.state, "version": control.progress.version}
        (folder / "result.json").write_text(json.dumps(found))
    if error:
        os._exit(1)  # as the service does: the other ranks are in the middle of a collective
    weights = {name: tensor.clone().numpy() for name, tensor in engine.weights.read()}
    if publisher is not None:
        np.savez(folder / "final.npz", **weights)
        publisher.close()
    engine.close()


def _die_after_a_file(version: int) -> None:
    """Files of 10 kB. Threads write several of them at once."""
    from trinity.trainer.weights import publisher, shards

    whole, one = publisher.write_shards, shards._write

    def write_shards(*given: Any, **options: Any) -> Any:
        return whole(*given, shard_bytes=10_000, **options)

    def write(path: Path, *given: Any) -> Any:
        found = one(path, *given)
        if path.parent.name.startswith(f".v{version}."):
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    publisher.write_shards = write_shards
    shards._write = write


def _die_after(publisher: Any, part: str, version: int = 2) -> None:
    """kill -9 of this process at the begin of `publish`, or the end of another part, of a version.

    `file`: the first of several files of the version is written.
    """
    if part == "file":
        _die_after_a_file(version)
        return
    owner = publisher._stores if part in ("put", "seal") else publisher
    work = getattr(owner, part)

    def dies(first: Any, *given: Any) -> Any:
        found = None if part == "publish" else work(first, *given)
        if version == (first if isinstance(first, int) else first.version):
            os.kill(os.getpid(), signal.SIGKILL)
        return work(first, *given) if part == "publish" else found

    setattr(owner, part, dies)


class Trainer:
    """start -> allow(step) ... -> wait or kill, then start again. The rank processes of one run."""

    def __init__(
        self, folder: Path, model: Path, sync: str, nats: str, *, steps: int, ranks: int = 1, zero: int = 0,
        lr: float = 1e-2, trainer: dict[str, Any] | None = None, synchronizer: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._ranks = ranks
        config = json.loads(json.dumps(BASE))
        config |= {"name": folder.name, "checkpoint_root_dir": str(folder / "jobs")}
        config["model"] |= {"model_path": str(model), "lora_configs": [lora] if lora else None}
        config["algorithm"]["optimizer"]["lr"] = lr
        config["trainer"] |= {"deepspeed": {"zero_stage": zero, "dtype": "float32"}, **(trainer or {})}
        config["synchronizer"] = {"sync_method": "checkpoint", **(synchronizer or {})}
        self._job = {"config": config, "folder": str(folder), "sync": sync, "nats": nats, "steps": steps}
        self._job["dies_after"] = ""
        self._processes: list[ForkedModule] = []
        self.plan: Plan = make_plan(Config.model_validate(config))
        self.run = names.run_id(self.plan.config.project, self.plan.config.name, self.plan.config.group)
        self.job = self.plan.job_dir
        self.versions = self.job / "weights"
        self.allow(0)

    def allow(self, step: int) -> None:
        """Batches up to this step can be had."""
        (self.folder / ".allowed").write_text(str(step))
        (self.folder / ".allowed").rename(self.folder / "allowed")

    def change(self, **synchronizer: Any) -> None:
        """Other settings, from the next start on."""
        self._job["config"]["synchronizer"] |= synchronizer

    def start(self, dies_after: str = "") -> "Trainer":
        """`dies_after`: a part of publishing version 2, such as `_write`; the process ends there as by kill -9."""
        self._job["dies_after"] = dies_after
        (self.folder / "result.json").unlink(missing_ok=True)
        job = self.folder / "job.json"
        job.write_text(json.dumps(self._job))
        self._processes = start_module("support.programs.trainer.releases", job, self._ranks, self.folder / "out.txt")
        return self

    def wait(self, seconds: float = 120) -> dict[str, Any]:
        """Until rank 0 ends by itself: its error (empty if none), state, and version."""
        try:
            if self._processes[0].wait(timeout=seconds) == 0:
                for process in self._processes[1:]:
                    process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the trainer did not end within {seconds:g} s: {self.tail()}") from None
        finally:
            self.kill()
        result = self.folder / "result.json"
        assert result.exists(), self.tail()
        return dict(json.loads(result.read_text()))

    def until_killed(self, seconds: float = 120) -> None:
        """Until rank 0 has ended by SIGKILL."""
        assert self._processes[0].wait(timeout=seconds) == -signal.SIGKILL, self.tail()

    def kill(self) -> None:
        """kill -9 of every rank."""
        for process in self._processes:
            process.kill()
            process.wait(timeout=20)

    def until(self, holds: Callable[[], Any], what: str, seconds: float = 90) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := holds():
                return found
            codes = [code for process in self._processes if (code := process.poll()) not in (None, 0)]
            assert not codes, f"the trainer ended before {what}, code {codes}: {self.tail()}"
            time.sleep(0.05)
        raise AssertionError(f"not within {seconds:g} s: {what}; {self.tail()}")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Rank 0's log lines of this name, of all starts."""
        path = self.folder / "log_0.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def tail(self) -> str:
        return "\n".join((self.folder / "out.txt").read_text(errors="replace").splitlines()[-25:])


class JudgingExplorer:
    """An explorer without an engine: joins, "loads" what it is told to, and reports what `error` gives as its canary.

    `error(manifest)` is the difference in nats that it claims to have found; 0: the same as the trainer's. As a real
    one it joins again when its lease is lost: on a busy machine it may get no CPU for the few seconds of a lease.
    """

    def __init__(self, sync: str, run: str, error: Callable[[Manifest], float] = lambda _: 0.0) -> None:
        self._channel = grpc.insecure_channel(sync)
        self._stub = sync_pb2_grpc.SyncServiceStub(self._channel)
        self._run, self._error = run, error
        self._ended = threading.Event()
        self._serves = -1
        self.candidates: list[Manifest] = []
        self._lease = self._join()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._watch, self._renew)]
        for thread in self._threads:
            thread.start()

    def _join(self) -> str:
        able = pb.Capabilities(transports=["folder", "s3", "jetstream"], dtype="float32", engines=1)
        request = pb.JoinRequest(run=self._run, explorer_id="judge", capabilities=able, pid=os.getpid(), host="here")
        return str(self._stub.Join(request, timeout=20, wait_for_ready=True).lease_id)

    def close(self) -> None:
        self._ended.set()
        self._stub.Leave(pb.LeaveRequest(run=self._run, lease_id=self._lease), timeout=20)
        self._channel.close()

    def __enter__(self) -> "JudgingExplorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _renew(self) -> None:
        while not self._ended.wait(0.5):
            with contextlib.suppress(grpc.RpcError):  # the watch sees to it
                self._report()

    def _watch(self) -> None:
        while not self._ended.is_set():
            try:
                for told in self._stub.Watch(pb.WatchRequest(run=self._run, lease_id=self._lease)):
                    self._take(told)
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed
                if not self._ended.is_set() and isinstance(error, ValueError):
                    raise
            with contextlib.suppress(grpc.RpcError, ValueError):
                if not self._ended.wait(0.2):
                    self._lease = self._join()

    def _take(self, told: pb.WatchResponse) -> None:
        if told.HasField("live"):
            self._serves = told.live.version
            self._report()
        if told.HasField("candidate"):
            manifest = manifest_from_proto(told.candidate)
            self.candidates.append(manifest)
            error = self._error(manifest)
            report = pb.CanaryReport(version=manifest.version, mean_error=error, max_error=error, expected=-1.0)
            report.computed = report.expected - error
            self._report(report)

    def _report(self, *canaries: pb.CanaryReport) -> None:
        self._stub.Report(
            pb.ReportRequest(
                run=self._run, lease_id=self._lease, version=self._serves, state=ExplorerState.RUNNING,
                failed_version=-1,
                canaries=canaries,
            ),
            timeout=20,
        )  # fmt: skip


class Sync:
    """Calls of the sync service for tests."""

    def __init__(self, address: str, run: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self.stub = sync_pb2_grpc.SyncServiceStub(self._channel)
        self._run = run

    def states(self) -> dict[int, str]:
        """State of each version, without the prefix."""
        answer = self.stub.ListVersions(pb.ListVersionsRequest(run=self._run), timeout=20, wait_for_ready=True)
        return {
            v.manifest.version: pb.VersionState.Name(v.state).removeprefix("VERSION_STATE_") for v in answer.versions
        }

    def manifest(self, version: int) -> Manifest:
        request = pb.GetVersionRequest(run=self._run, version=version)
        return manifest_from_proto(self.stub.GetVersion(request, timeout=20).version.manifest)

    def roll_back(self, version: int) -> pb.RollbackRecord:
        request = pb.RollbackRequest(run=self._run, version=version, reason="a test")
        return self.stub.Rollback(request, timeout=20).rollback


if __name__ == "__main__":
    main()
