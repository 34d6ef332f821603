"""The job folder: its owner, its processes, its finished stages.

<job>/.lock                 held by the supervisor of mode both or train
<job>/run/<name>.json       one live supervisor: its pid and processes
<job>/prometheus.json       addresses of /metrics, in the format of Prometheus' file_sd
<job>/version.json          the version that began it (run_record.py)
<job>/identity/             tokens of the run's roles, of mode 0600 (docs/security.md)
<job>/nats/                 store of the embedded nats-server
<job>/[<stage>/]config.json log/ monitor/ weights/ global_step_<n>/ finished.json
<job>/summary.json          results of a run that has finished
<job>/failed.json           why the run ended before that, unless a signal ended it

Configurations, identities and pydantic are imported where they are used: `trinity status` of a finished run needs none.
"""

import contextlib
import math
import os
import re
import socket
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trinity.reading.errors import RunError
from trinity.reading.nats import NatsAccess
from trinity.runtime import files
from trinity.runtime.names import run_id
from trinity.runtime.process import FileLock, begun_at, is_alive
from trinity.runtime.trust.roles import Role

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from trinity.config import Config

READS = "reads"  # in the lock of a job, of commands and pages on a run that is not live
_CERTIFIED_SERVICE = re.compile("TRINITY_(BUFFER|ENVIRONMENT|EXPLORER|SYNC|TRAINER)_TLS_CERT")


@dataclass
class ProcessRecord:
    """One process of a supervisor, as `trinity status` shows it."""

    name: str
    service: str
    pid: int
    address: str
    metrics: str = ""
    restarts: int = 0
    log: str = ""
    gpus: list[str] = field(default_factory=list)


@dataclass
class SupervisorRecord:
    """A live `trinity run`."""

    pid: int
    mode: str
    run: str
    stage: str
    nats_url: str  # without user and password
    processes: list[ProcessRecord] = field(default_factory=list)
    nats_users: str = ""  # folder of the accounts of an embedded NATS
    host: str = field(default_factory=socket.gethostname)  # where its process ids mean anything
    begun: int = 0  # of its process, as `begun_at` says; 0 in records of older versions

    def nats(self) -> NatsAccess:
        """Returns the access of another command to the run's NATS. TRINITY_NATS_URL adds user and password."""
        given = os.environ.get("TRINITY_NATS_URL")
        users = Path(self.nats_users) if self.nats_users and not given else None
        return NatsAccess(given or self.nats_url, users)


class Job:
    """The folder of one run, or of all stages of a run."""

    def __init__(self, config: "Config") -> None:
        self.folder = make_folder(config)
        self.token = run_id(config.project, config.name, config.group)

    def lock(self, name: str = "") -> FileLock:
        """Returns the lock of the run, or of one joining explorer, and makes the folder."""
        make_private(self.folder)
        return FileLock(self.folder / (f".lock-{name}" if name else ".lock"))

    def write_record(self, name: str, record: SupervisorRecord) -> None:
        from trinity.runtime.logs import bare_url

        shown = {**asdict(record), "nats_url": bare_url(record.nats_url), "begun": begun_at(record.pid)}
        files.write_json(self.folder / "run" / f"{name}.json", shown, mode=0o600)
        self._write_targets()

    def remove_record(self, name: str) -> None:
        """Raises no error: a full disk is no reason to leave the command's processes running."""
        with contextlib.suppress(OSError, RunError):
            (self.folder / "run" / f"{name}.json").unlink(missing_ok=True)
            self._write_targets()

    def _write_targets(self) -> None:
        targets = [
            {"targets": [process.metrics], "labels": {"run": record.run, "service": process.service}}
            for record in self.records().values()
            for process in record.processes
            if process.metrics and process.service != "nats"  # its monitoring port speaks JSON
        ]
        files.write_json(self.folder / "prometheus.json", targets)

    def taken_gpus(self) -> set[str]:
        """Returns the GPUs of this machine that other commands of the run hold."""
        others = [record for record in self.records().values() if record.pid != os.getpid()]
        return {card for record in others for process in record.processes for card in process.gpus}

    def records(self) -> dict[str, SupervisorRecord]:
        return read_records(self.folder)

    def elsewhere(self) -> SupervisorRecord | None:
        """Returns the run's supervisor on another machine that shares the job folder, if its NATS can be reached from
        here.

        The supervisor may have ended.
        """
        from trinity.runtime.settings import is_loopback

        path = self.folder / "run" / "main.json"
        record = _parse(path, files.read_json(path))
        if record is None or record.host == socket.gethostname():
            return None
        return record if record.nats_url and not is_loopback(urlsplit(record.nats_url).hostname or "") else None


def identify(job: Path | None, role: Role = Role.OPERATOR, *, starts_services: bool = False) -> None:
    """Sets the role of this command in the run of a job folder, or of none, for channels opened from now on.

    TRINITY_TLS_* is its identity in a run whose services have certificates. Otherwise a command that starts services
    makes the tokens of a new job; other commands have no identity if the folder has no tokens. TRINITY_IDENTITY_FOLDER
    names the folder of a run with another job folder. TRINITY_INSECURE=1 lets tokens cross the network unencrypted.
    Raises RunError if that folder has no tokens, or if both kinds of identity are set.
    """
    from trinity.runtime.trust import identity
    from trinity.runtime.trust.tls import TlsFiles, TlsIdentity
    from trinity.runtime.trust.tokens import has_tokens, make_tokens

    certificate = TlsFiles.from_environment(os.environ)
    given = os.environ.get("TRINITY_IDENTITY_FOLDER")
    if starts_services and job is not None and not given:
        make_private(job)
    folder = Path(given) if given else job / "identity" if job is not None else None
    if certificate is not None:
        if given:
            raise RunError("TRINITY_IDENTITY_FOLDER and TRINITY_TLS_CERT are set; a run has one kind of identities", 2)
        identity.configure(identity.of_certificate(TlsIdentity(certificate)))
        return
    if folder is None:
        identity.configure(None)
        return
    if given and not has_tokens(folder):
        raise RunError(f"TRINITY_IDENTITY_FOLDER: {given} has no tokens that this user may read", code=2)
    if starts_services:
        if certified := [name for name in os.environ if _CERTIFIED_SERVICE.fullmatch(name)]:
            raise RunError(f"{certified[0]} is set, but TRINITY_TLS_CERT is not: `trinity certs issue operator`", 2)
        make_tokens(folder)
    insecure = os.environ.get("TRINITY_INSECURE") == "1"
    identity.configure(identity.Identity(role, folder, insecure=insecure) if has_tokens(folder) else None)


def make_private(folder: Path) -> None:
    """Makes a job folder that only its user may read: it holds samples, weights and logs.

    An existing folder keeps its mode.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def make_folder(config: "Config") -> Path:
    """Returns <root>/<project>/[group/]<name>, absolute."""
    parts = [config.project, *([config.group] if config.group else []), *config.name.split("/")]
    return Path(config.checkpoint_root_dir).expanduser().absolute().joinpath(*parts)


def read_records(folder: Path) -> dict[str, SupervisorRecord]:
    """Returns the live supervisors of this machine in a job folder, by name."""
    found: dict[str, SupervisorRecord] = {}
    for path in sorted((folder / "run").glob("*.json")):
        value = files.read_json(path)
        pid = value.get("pid") if isinstance(value, dict) else None
        if type(pid) is not int or not is_alive(pid):
            continue
        record = _parse(path, value)
        if record is not None and record.host == socket.gethostname() and record.begun in (0, begun_at(pid)):
            found[path.stem] = record
    return found


def _parse(path: Path, value: Any) -> SupervisorRecord | None:
    """Returns None if the value is no record. Raises RunError for a record of another version."""
    if not isinstance(value, dict) or "pid" not in value:
        return None
    from pydantic import ValidationError

    try:
        return _validator().validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"]))
        raise RunError(f"{path}: {at}: {first['msg']}; process {value['pid']} seems to be of another version") from None


@cache
def _validator() -> "TypeAdapter[SupervisorRecord]":
    from pydantic import TypeAdapter

    return TypeAdapter(SupervisorRecord)


def live_jobs(root: Path) -> list[Path]:
    """Returns job folders below `root` with a live supervisor, newest first."""
    folders = {path.parent.parent for path in root.glob("**/run/*.json") if _lives(path.parent.parent)}
    return sorted(folders, key=lambda folder: -(folder / "run").stat().st_mtime)


def is_job(folder: Path) -> bool:
    """Returns True if a run ever began in a folder."""
    return _lives(folder) or (folder / "summary.json").exists() or bool(stage_configs(folder))


def _lives(folder: Path) -> bool:
    """Returns True if a supervisor lives in a folder, also one of another version, so that a list of runs does not end
    there.

    False if the record cannot be read.
    """
    try:
        return bool(read_records(folder))
    except RunError:
        return True
    except OSError:
        return False


def stage_configs(folder: Path) -> list[Path]:
    """Returns the config.json of the job or of each of its stages."""
    found = [*folder.glob("config.json"), *sorted(folder.glob("*/config.json"))]  # deeper ones are of `trinity replay`
    return [path for path in found if (path.parent / "log").is_dir()]


def known_jobs(root: Path) -> list[Path]:
    """Returns job folders below `root`, live or not, newest first."""
    locks = sorted(root.glob("**/.lock"), key=lambda path: -path.parent.stat().st_mtime)
    return [path.parent for path in locks if is_job(path.parent)]


def finished_step(stage_folder: Path) -> int:
    """Returns the step at which a stage finished; -1 if it did not."""
    return _finished(stage_folder)[0]


def finished_summary(stage_folder: Path) -> dict[str, Any]:
    """Returns the summary of a finished stage, perhaps of fewer steps than now; empty if it never finished."""
    return _finished(stage_folder)[1]


def _finished(stage_folder: Path) -> tuple[int, dict[str, Any]]:
    """Returns step and summary.

    A damaged file means that the stage has not finished and runs again from its last checkpoint.
    """
    value = files.read_json(stage_folder / "finished.json")
    found = value if isinstance(value, dict) else {}
    step, summary = found.get("step"), found.get("summary")
    if type(step) is not int or not isinstance(summary, dict) or not _is_seconds(summary.get("wall_seconds")):
        return -1, {}
    return step, summary


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def describe_finished(folder: Path) -> dict[str, Any]:
    """Returns the state of a run without a process here (finished, failed, stopped, or live on another machine), with
    its summary or the reason.

    `trained`: the last trained step, the stage's last one and its name; None if no step was trained.
    """
    from trinity.weights.checkpoints import complete_steps

    read = files.read_json(folder / "summary.json")
    summary = read if isinstance(read, dict) else None
    stages = {str(path.parent.relative_to(folder)): complete_steps(path.parent) for path in stage_configs(folder)}
    failure = files.read_json(folder / "failed.json")
    reason = str(failure.get("reason")) if isinstance(failure, dict) else None
    state = "finished" if summary is not None else "failed" if reason is not None else "stopped"
    if state == "stopped":
        state, reason = _without_result(folder)
    return {
        "job": str(folder),
        "state": state,
        "reason": reason,
        "trained": last_trained(folder),
        "checkpoints": {name: steps for name, steps in stages.items() if steps},
        "summary": summary,
    }


def _without_result(folder: Path) -> tuple[str, str | None]:
    """Returns the state, and its reason, of a run that has neither finished nor failed."""
    main = files.read_json(folder / "run" / "main.json")
    if not isinstance(main, dict):
        return "stopped", None
    where = f" on {main['host']}" if main.get("host") not in (None, socket.gethostname()) else ""
    process = f"`trinity run` (process {main.get('pid')}{where})"
    lock = FileLock(folder / ".lock")
    if where and lock.doing() != READS and lock.is_held():
        return "live", f"{process} holds this folder; `trinity status` there shows it, or here with --nats and --run"
    return "stopped", f"{process} was killed, or the machine went down"


def last_trained(folder: Path) -> dict[str, Any] | None:
    """Returns the newest note of the trainer about a step."""
    notes = [path.parent / "monitor" / "batches.jsonl" for path in stage_configs(folder)]
    newest = max((path for path in notes if path.exists()), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return None
    last = next(files.json_lines(reversed(newest.read_bytes().splitlines())), {})
    stage = newest.parent.parent.relative_to(folder).as_posix()
    found = {"step": last.get("step"), "last_step": last.get("last_step"), "stage": "" if stage == "." else stage}
    return found if type(found["step"]) is int else None


def begin(folder: Path) -> None:
    """Remove what says how an earlier command on the same job ended."""
    for name in ("summary.json", "failed.json"):
        (folder / name).unlink(missing_ok=True)


def mark_failed(folder: Path, reason: str) -> None:
    files.write_json(folder / "failed.json", {"reason": reason})


def mark_finished(stage_folder: Path, step: int, part: dict[str, Any]) -> None:
    files.write_json(stage_folder / "finished.json", {"step": step, "summary": part})


def fresh_name(config: "Config", stamp: str) -> "Config":
    """With continue_from_checkpoint: false, gives the run a new name if its folder has content."""
    folder = make_folder(config)
    if config.continue_from_checkpoint or not folder.exists() or not any(os.scandir(folder)):
        return config
    return config.model_copy(update={"name": f"{config.name}_{stamp}"})
