"""A cluster of Slurm on this machine: munged, slurmctld, and a slurmd for each node with its loopback address.

Ports are free ones, files lie in a temporary folder, and each daemon is ended by its pid.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from trinity.runtime.process import free_port

_NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
_START_SECONDS = 60.0
_CPUS = 2


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    absent = [name for name in _NEEDED if _program(name) is None]
    if absent:
        return f"no {', '.join(absent)}: `apt-get install slurm-wlm munge`"
    return "" if os.getuid() == 0 else "slurmd starts jobs as root alone: run the tests as root"


class SlurmCluster:
    """A context manager. `environment` is for commands of Slurm and their callers."""

    def __init__(self, nodes: int) -> None:
        # A socket's path has at most 107 bytes, which those of pytest's folders exceed.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.nodes = {f"node{i}": f"127.0.0.{i + 1}" for i in range(1, nodes + 1)}
        self._config = self.folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self._config)}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "SlurmCluster":
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._config.write_text(self._text())
        files = {name: f"--{name}={self.folder}/munged.{name}" for name in ("socket", "pid-file", "log-file")}
        try:
            self._start("munged", "--foreground", "--force", f"--key-file={key}", *files.values(),
                        f"--seed-file={self.folder}/munged.seed")  # fmt: skip
            self.until(lambda: (self.folder / "munged.socket").exists(), _START_SECONDS, "munged's socket")
            self._start("slurmctld", "-D", "-f", str(self._config))
            for node in self.nodes:
                self._start("slurmd", "-D", "-N", node, "-f", str(self._config))
            self.until(self._is_idle, _START_SECONDS, "idle nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the daemons, and every process of a job."""
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            self.call("scancel", f"--user={getpass.getuser()}")
            self.until(lambda: not self.call("squeue", "--noheader"), 60, "an empty queue")
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == str(self._config) and process.pid != os.getpid():
                    process.kill()
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(timeout=20)
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, *command: str) -> str:
        """Output of a command of Slurm. Raises AssertionError with its message if it fails."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def jobs(self) -> dict[str, str]:
        """State of each job in the queue, by its id; of an array's element `<array>_<index>`."""
        rows = self.call("squeue", "--noheader", "--array", "--format=%i %T").splitlines()
        return {job: state for job, _, state in (row.partition(" ") for row in rows)}

    def about(self, job: str) -> dict[str, str]:
        """Output of `scontrol show job` for one job, also for some time after its end."""
        parts = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return {key: value for key, _, value in (part.partition("=") for part in parts)}

    def until(self, holds: Callable[[], object], seconds: float, what: str) -> None:
        """AssertionError with the daemons' last lines when the time is over."""
        deadline = time.monotonic() + seconds
        while not holds():
            for daemon in self._daemons:
                assert daemon.poll() is None, f"a daemon of Slurm ended: {self._said()}"
            assert time.monotonic() < deadline, f"no {what} after {seconds:g} s: {self._said()}"
            time.sleep(0.3)

    def _is_idle(self) -> bool:
        with contextlib.suppress(AssertionError):  # slurmctld does not answer yet
            return self.call("sinfo", "--noheader", "--Node", "--format=%t").split() == ["idle"] * len(self.nodes)
        return False

    def _start(self, name: str, *arguments: str) -> None:
        program = _program(name)
        assert program is not None
        with (self.folder / f"{name}-{len(self._daemons)}.out").open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    [program, *arguments], env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    start_new_session=True,
                )
            )  # fmt: skip

    def _said(self) -> str:
        return "\n".join(
            f"{path.name}: {line}"
            for path in sorted(self.folder.glob("*.out"))
            for line in path.read_text(errors="replace").splitlines()[-5:]
        )

    def _text(self) -> str:
        host, user = socket.gethostname().partition(".")[0], getpass.getuser()
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr={address} Port={free_port()} CPUs={_CPUS}"
            for node, address in self.nodes.items()
        )
        # A requeued job starts after the time in which its credential is valid.
        return f"""ClusterName=trinity
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={self.folder}/munged.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait=30
MinJobAge=3600
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes={",".join(self.nodes)} Default=YES State=UP
"""


def _program(name: str) -> str | None:
    """Daemons are in sbin, which users do not have on PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
