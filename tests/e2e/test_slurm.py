"""`trinity launch slurm` on a real slurmctld and three slurmd: submit, requeue an explorer, cancel, resume, finish."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.checks.audit import Findings, TrainerRecord, audit, read
from support.programs.run import write_config
from support.servers import slurm
from support.servers.nats import NatsServer
from trinity.config import expand, load, make_plan
from trinity.runtime.broker import connect
from trinity.runtime.names import run_id

pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "there is a Slurm"),
]

GROUPS = 8
MORE_STEPS = 4


@pytest.fixture
def cluster() -> Iterator[slurm.SlurmCluster]:
    with slurm.SlurmCluster(3) as running:
        yield running


class Run:
    """A run of two stages, whose length is in the environment: the command that resumes it is the same."""

    def __init__(self, cluster: slurm.SlurmCluster, config: Path, folder: Path, **environment: str) -> None:
        self.cluster = cluster
        self.config = config
        self.environment = {**cluster.environment, **environment}
        self.job = folder / "jobs/slurm tests/a $(touch hacked) run"

    def launch(self, steps: int) -> str:
        """What the command prints."""
        command = [sys.executable, "-m", "trinity.cli.main", "launch", "slurm", "--config", str(self.config), "-N", "3",
                   "--partition", "main", "--time", "1:00:00", "--explorer-sbatch", "comment=may be pre-empted",
                   "--", "synchronizer.sync_interval=2"]  # fmt: skip
        environment = {**self.environment, "TEST_STEPS": str(steps)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode in (0, 1), done.stderr
        return done.stdout + done.stderr

    def steps(self) -> int:
        lines = self._lines(self.job / "rft/monitor/batches.jsonl")
        return max((line["step"] for line in lines), default=0)

    def events(self, explorer: str, event: str) -> list[dict[str, Any]]:
        lines = self._lines(self.job / f"rft/log/{explorer}.log")
        return [line for line in lines if line["event"] == event]

    def until(self, holds: Any, seconds: float, what: str) -> None:
        """AssertionError, with what the jobs printed, when the time is over, or no job is left before it holds."""

        def checked() -> bool:
            left = self.cluster.jobs()
            if holds():
                return True
            assert left, f"all jobs ended before: {what}"
            return False

        try:
            self.cluster.until(checked, seconds, what)
        except AssertionError as error:
            printed = "\n".join(f"{path}: {path.read_text()[-3000:]}" for path in self.job.glob("slurm/*.out"))
            raise AssertionError(f"{error}\n{self.cluster.jobs()}\n{printed}") from None

    @staticmethod
    def _lines(path: Path) -> list[dict[str, Any]]:
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def job_of(launched: str, what: str) -> str:
    """Id of a job that the command said it submitted."""
    return next(line.split()[1].rstrip(":") for line in launched.splitlines() if what in line)


@pytest.fixture
def run(
    cluster: slurm.SlurmCluster, repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path: Path
) -> Run:
    changes = {
        "project": "slurm tests",
        "name": "a $(touch hacked) run",
        "algorithm": {"repeat_times": 4},
        "buffer": {
            "batch_size": GROUPS,
            "total_steps": "${oc.decode:${oc.env:TEST_STEPS}}",
            "explorer_input": {"eval_tasksets": []},
        },
        "model": {"max_response_tokens": 24},
        "explorer": {"runner_per_model": 8},
        "trainer": {"save_interval": 2},
        "stages": {0: {"buffer": {"total_steps": 4}, "trainer": {"save_interval": 2}}},
    }
    config = write_config(repository / "examples/quickstart/arithmetic.yaml", tmp_path / "run.yaml", changes)
    settings = {
        "TRINITY_CHECKPOINT_ROOT_DIR": str(tmp_path / "jobs"),
        "TRINITY_MODEL_PATH": str(quickstart_model),
        "TRINITY_TASKSET_PATH": str(quickstart_data),
        "TRINITY_LOG_LEVEL": "DEBUG",  # explorers say then which groups they stored
    }
    return Run(cluster, config, tmp_path, **settings)


def test_a_requeued_explorer_and_a_cancelled_run(
    run: Run, cluster: slurm.SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run.launch(steps=100_000)
    main, array = job_of(first, "trainer"), job_of(first, "explorer(s)")
    assert f"the run is in the queue as job {main}" in run.launch(steps=100_000)

    # Both explorers work, then one of them is pre-empted: it hands its tasks back, and comes back.
    both = ("explorer-1", "explorer-2")
    run.until(lambda: all(run.events(name, "explorer.group.stored") for name in both), 600, "groups of both explorers")
    certificate = (run.job / "slurm/identity/explorer-1/tls.crt").read_bytes()
    cluster.call("scontrol", "requeue", f"{array}_1")
    run.until(lambda: run.events("explorer-1", "explorer.drained"), 60, "explorer that hands its tasks back")
    at = run.steps()
    run.until(lambda: run.steps() > at + 2, 200, "steps while one explorer is away")
    ready = len(run.events("explorer-1", "service.ready"))
    run.until(lambda: len(run.events("explorer-1", "service.ready")) > ready, 400, "explorer that is back")
    stored = len(run.events("explorer-1", "explorer.group.stored"))
    run.until(lambda: len(run.events("explorer-1", "explorer.group.stored")) > stored, 200, "groups of the one back")
    assert cluster.about(f"{array}_1")["Restarts"] == "1"
    assert (run.job / "slurm/identity/explorer-1/tls.crt").read_bytes() != certificate

    # The run's job ends as at its time limit: its explorers end with it, and the same command resumes the run.
    cluster.call("scancel", "--batch", "--signal=TERM", main)
    run.until(lambda: not cluster.jobs(), 90, "end of all jobs")
    assert cluster.about(main)["ExitCode"] == "143:0"
    assert "the same command resumes the run" in (run.job / "slurm/run.out").read_text()
    begun = run.steps()
    second = run.launch(steps=begun + MORE_STEPS)
    main, array = job_of(second, "trainer"), job_of(second, "explorer(s)")
    run.until(lambda: not cluster.jobs(), 600, "end of the resumed run")
    states = [cluster.about(job)["JobState"] for job in (main, f"{array}_1", f"{array}_2")]
    assert states == ["COMPLETED"] * 3, (run.job / "slurm/run.out").read_text()

    secret = [*run.job.glob("slurm/identity/**/*.key"), *run.job.glob("identity/nats/**/*.creds")]
    assert secret
    assert all(path.stat().st_mode & 0o077 == 0 for path in secret)

    for name in ("TRINITY_MODEL_PATH", "TRINITY_TASKSET_PATH"):
        monkeypatch.setenv(name, run.environment[name])
    monkeypatch.setenv("TEST_STEPS", str(begun + MORE_STEPS))
    found = asyncio.run(audited(run, begun + MORE_STEPS))
    assert (found.doubled, found.ledger) == ([], [])
    summary = json.loads((run.job / "summary.json").read_text())
    assert (summary["steps"], summary["dead_letters"]) == (begun + MORE_STEPS, 0)
    assert not list(Path.cwd().glob("hacked"))


async def audited(run: Run, steps: int) -> Findings:
    """The second stage's ledger, read from the store that the run left."""
    config = load(run.config, [f"checkpoint_root_dir={run.job.parent.parent}"])
    stage = make_plan(expand(config)[1])
    run_name = run_id(stage.config.project, stage.config.name, stage.config.group)
    server = NatsServer(run.job / "nats", users=run.job / "identity/nats")
    server.start()
    try:
        said = TrainerRecord(stage.job_dir / "monitor/batches.jsonl")
        said.read()
        async with await connect(server.url, "test", creds=server.admin()) as broker:
            summary = json.loads((run.job / "summary.json").read_text())
            records = await read(broker, run_name, stage.job_dir, said.said, summary=summary)
            return audit(records, steps, GROUPS)
    finally:
        server.stop()
