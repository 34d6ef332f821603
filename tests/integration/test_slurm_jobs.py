"""Which jobs of `trinity launch slurm` end together, on a real slurmctld and slurmd.

A stand-in runs in place of the run's processes; tests/e2e/test_slurm.py has a real run.
"""

import contextlib
import getpass
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from support.servers import slurm
from trinity.cli.main import app

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "there is a Slurm"),
]

# In place of Python with `-m trinity.cli.main`: runs until a file, of all jobs or its own, says with which code to end.
_STAND_IN = """#!/bin/bash
[[ $3 == certs ]] && exit
me=${SLURM_ARRAY_TASK_ID:-main}
trap 'echo "$me ended by TERM" >> "$FOLDER/said"; exit 143' TERM
echo "$me began" >> "$FOLDER/said"
until file=$FOLDER/end; [[ -e $file ]] || { file=$FOLDER/end-$me; [[ -e $file ]]; }; do sleep 0.2; done
exit "$(<"$file")"
"""


class Launch:
    """`trinity launch slurm` with a stand-in for what the script runs."""

    def __init__(self, cluster: slurm.SlurmCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        taskset = {"path": str(folder), "format": {"prompt_key": "q", "response_key": "a"}}
        values = {
            "project": "tests",
            "name": "jobs",
            "checkpoint_root_dir": str(folder / "jobs"),
            "model": {"model_path": "m", "max_prompt_tokens": 8, "max_response_tokens": 8},
            "algorithm": {"algorithm_type": "grpo"},
            "buffer": {"batch_size": 2, "total_steps": 2, "explorer_input": {"taskset": taskset}},
        }
        self._config = folder / "run.yaml"
        self._config.write_text(yaml.safe_dump(values))
        self.main = self.array = ""

    def __call__(self, nodes: int) -> None:
        """Submit, and wait until as many jobs as there are nodes have begun."""
        for name in ("end", "end-main"):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "said").write_text("")
        arguments = ["--config", str(self._config), "-N", str(nodes), "--sbatch", "exclusive"]
        done = CliRunner().invoke(app, ["launch", "slurm", *arguments])
        assert done.exit_code == 0, done.output
        self.main, self.array = (line.split()[1].rstrip(":") for line in done.stdout.splitlines()[:2])
        self.cluster.until(  # leftovers of an earlier one may say meanwhile that they end
            lambda: sum(line.endswith(" began") for line in self.said()) == min(nodes, 3), 120, "jobs that began"
        )

    def said(self) -> list[str]:
        return (self.folder / "said").read_text().splitlines()

    def end(self, code: int, job: str = "") -> None:
        """Let the stand-in of each job end with this code, or of one, such as "main"."""
        (self.folder / (f"end-{job}" if job else "end")).write_text(str(code))

    def states(self) -> list[str]:
        """Of the run's job and its explorers, once none is in the queue."""
        self.cluster.until(lambda: not self.cluster.jobs(), 120, "an empty queue")
        return [self.cluster.about(job)["JobState"] for job in (self.main, f"{self.array}_1", f"{self.array}_2")]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    stand_in = tmp_path / "python"
    stand_in.write_text(_STAND_IN)
    stand_in.chmod(0o700)
    with slurm.SlurmCluster(3) as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        monkeypatch.setenv("FOLDER", str(tmp_path))
        monkeypatch.setattr(sys, "executable", str(stand_in))
        yield Launch(cluster, tmp_path)


def test_explorers_end_with_their_run_and_outlive_its_requeueing(launch: Launch) -> None:
    cluster = launch.cluster
    launch(3)
    cluster.call("scontrol", "requeue", launch.main)
    cluster.until(lambda: launch.said().count("main began") == 2, 180, "run that is back")
    assert sorted(launch.said()) == ["1 began", "2 began", "main began", "main began", "main ended by TERM"]
    launch.end(0)
    assert launch.states() == ["COMPLETED"] * 3

    launch(3)
    cluster.call("scancel", "--batch", "--signal=TERM", launch.main)  # as at its time limit
    assert launch.states() == ["FAILED", "CANCELLED", "CANCELLED"]
    assert {"main ended by TERM", "1 ended by TERM", "2 ended by TERM"} < {*launch.said()}

    launch(3)
    cluster.call("scancel", launch.main)
    assert launch.states() == ["CANCELLED"] * 3


def test_an_explorer_that_waits_for_a_node_is_cancelled_with_a_finished_run_and_leftovers_with_the_next(
    launch: Launch,
) -> None:
    cluster = launch.cluster
    launch(4)
    assert cluster.jobs()[f"{launch.array}_3"] == "PENDING"
    launch.end(0, "main")  # before the others: the node of one that ends is free for the one that waits
    cluster.until(lambda: f"{launch.array}_3" not in cluster.jobs(), 120, "end of the explorer that waits")
    launch.end(0)
    assert launch.states() == ["COMPLETED"] * 3
    assert cluster.about(f"{launch.array}_3")["JobState"] == "CANCELLED"
    assert "3 began" not in launch.said()

    launch(3)
    for process in psutil.process_iter():  # the script's shell: it can do nothing any more
        with contextlib.suppress(psutil.Error):
            if process.environ().get("SLURM_JOB_ID") == launch.main and "slurm_script" in " ".join(process.cmdline()):
                process.kill()
    cluster.until(lambda: launch.main not in cluster.jobs(), 60, "end of the run's job")
    assert sorted(cluster.jobs().values()) == ["RUNNING", "RUNNING"], "the script had no time to cancel them"
    left = launch.array
    launch(3)
    assert not [job for job in cluster.jobs() if job.startswith(f"{left}_")]
    cluster.call("scancel", f"--user={getpass.getuser()}")
