"""The job folder: who owns it, what runs in it, which stages are done.

<job>/.lock                 held by the supervisor of mode both or train
<job>/run/<name>.json       one live supervisor: its pid and processes
<job>/prometheus.json         addresses of /metrics, as Prometheus' file_sd reads them
<job>/version.json          the version that began it (run_record.py)
<job>/identity/             tokens of the run's roles, of mode 0600 (docs/security.md)
<job>/nats/                 store of the embedded nats-server
<job>/[<stage>/]config.json log/ monitor/ weights/ global_step_<n>/ finished.json
<job>/summary.json
"""

import math
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from trinity.config import Config, ConfigError, Problem, expand, make_plan
from trinity.reading.errors import RunError
from trinity.reading.nats import NatsAccess
from trinity.runtime import files
from trinity.runtime.logs import bare_url
from trinity.runtime.names import run_id
from trinity.runtime.process import FileLock, is_alive
from trinity.runtime.settings import is_loopback
from trinity.runtime.trust import identity
from trinity.runtime.trust.identity import Identity
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.tls import TlsFiles, TlsIdentity
from trinity.runtime.trust.tokens import has_tokens, make_tokens

# Sockets, logs and weights below the job folder need the rest of the system's 4,096.
_LONGEST_PATH = 3_000
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

    def nats(self) -> NatsAccess:
        """How another command uses the run's NATS; TRINITY_NATS_URL says it with user and password."""
        given = os.environ.get("TRINITY_NATS_URL")
        users = Path(self.nats_users) if self.nats_users and not given else None
        return NatsAccess(given or self.nats_url, users)


_SUPERVISOR = TypeAdapter(SupervisorRecord)


class Job:
    """The folder of one run, or of all stages of a run."""

    def __init__(self, config: Config) -> None:
        self.folder = make_folder(config)
        self.token = run_id(config.project, config.name, config.group)

    def lock(self, name: str = "") -> FileLock:
        """The lock of the run itself, or of one joining explorer, in the folder, which is made."""
        make_private(self.folder)
        return FileLock(self.folder / (f".lock-{name}" if name else ".lock"))

    def write_record(self, name: str, record: SupervisorRecord) -> None:
        shown = {**asdict(record), "nats_url": bare_url(record.nats_url)}
        files.write_json(self.folder / "run" / f"{name}.json", shown, mode=0o600)
        self._write_targets()

    def remove_record(self, name: str) -> None:
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
        """GPUs of this machine that other commands of the run hold."""
        others = [record for record in self.records().values() if record.pid != os.getpid()]
        return {card for record in others for process in record.processes for card in process.gpus}

    def records(self) -> dict[str, SupervisorRecord]:
        return read_records(self.folder)

    def elsewhere(self) -> SupervisorRecord | None:
        """The run's supervisor on another machine that shares the job folder, if its NATS listens for others. It may
        have ended."""
        path = self.folder / "run" / "main.json"
        record = _parse(path, files.read_json(path))
        if record is None or record.host == socket.gethostname():
            return None
        return record if record.nats_url and not is_loopback(urlsplit(record.nats_url).hostname or "") else None


def identify(job: Path | None, role: Role = Role.OPERATOR, *, starts_services: bool = False) -> None:
    """This command has a role in the run of a job folder, or of none, for the channels that it opens from now on.

    TRINITY_TLS_* is its identity in a run whose services have certificates. Else a command that starts services makes
    the tokens of a new job, and others have no identity where the folder has none. TRINITY_IDENTITY_FOLDER names the
    folder of a run whose job folder is another. TRINITY_INSECURE=1 lets tokens cross the network unencrypted. RunError
    if that folder has no tokens, or for both kinds at once.
    """
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
    identity.configure(Identity(role, folder, insecure=insecure) if has_tokens(folder) else None)


def make_private(folder: Path) -> None:
    """Make a job folder for its user alone: samples, weights and logs lie in it. One that is there keeps its mode."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def make_folder(config: Config) -> Path:
    """<root>/<project>/[group/]<name>, absolute."""
    parts = [config.project, *([config.group] if config.group else []), *config.name.split("/")]
    return Path(config.checkpoint_root_dir).expanduser().absolute().joinpath(*parts)


def check_folder(config: Config, source: str) -> None:
    """Raise ConfigError unless the folders of the job, of stores and of task pipelines are there or can be made."""
    places = [("checkpoint_root_dir", "the job folder", make_folder(config)), *_outputs(config)]
    if config.stages and not _why_not(make_folder(config)):
        places += [("checkpoint_root_dir", "the folder of a stage", make_folder(stage)) for stage in expand(config)]
    stores = config.synchronizer.storage if config.mode in ("both", "train") else []
    for index, entry in enumerate(stores):
        if entry.startswith("/"):
            places.append((f"synchronizer.storage.{index}", "the folder", Path(entry)))
    problems = []
    for key, what, folder in places:
        if problem := _why_not(folder):
            problems.append(
                Problem(key, f"{what} {str(folder)[:200]!r} cannot be made: {problem}; give another folder")
            )
    if problems:
        raise ConfigError(source, problems)


def _outputs(config: Config) -> Iterator[tuple[str, str, Path]]:
    """Folders of what task pipelines write, where it is not there yet."""
    for stage in expand(config) if config.mode in ("both", "train") else []:
        pipeline = stage.data_processor.task_pipeline
        output = Path(pipeline.output).expanduser().absolute() if pipeline and pipeline.output else None
        if output is not None and not os.path.exists(output):
            folder = output.parent if output.suffix else output
            yield "data_processor.task_pipeline.output", "the folder", folder


def _why_not(folder: Path) -> str:
    """Why a folder is not there and cannot be made; empty if it is or can."""
    place = folder
    try:
        while not os.path.lexists(place) and place != place.parent:
            place = place.parent
        if not place.is_dir():
            return f"{place} is {'a link to nowhere' if not place.exists() else 'a file, no folder'}"
        if len(os.fsencode(folder)) > _LONGEST_PATH:
            return f"its path has more than {_LONGEST_PATH} bytes"
        # For root, permissions say nothing of /proc, of read-only mounts and of full disks.
        os.rmdir(tempfile.mkdtemp(prefix=".trinity-check-", dir=place))
    except PermissionError:
        return f"there is no permission to write in {place}"
    except (OSError, ValueError) as error:
        return f"in {place}: {getattr(error, 'strerror', None) or error}"
    return ""


def read_records(folder: Path) -> dict[str, SupervisorRecord]:
    """Supervisors alive on this machine in a job folder, by name."""
    found: dict[str, SupervisorRecord] = {}
    for path in sorted((folder / "run").glob("*.json")):
        value = files.read_json(path)
        pid = value.get("pid") if isinstance(value, dict) else None
        if type(pid) is not int or not is_alive(pid):
            continue
        record = _parse(path, value)
        if record is not None and record.host == socket.gethostname():
            found[path.stem] = record
    return found


def _parse(path: Path, value: Any) -> SupervisorRecord | None:
    """None for what is no record. RunError for one of another version."""
    if not isinstance(value, dict) or "pid" not in value:
        return None
    try:
        return _SUPERVISOR.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"]))
        raise RunError(f"{path}: {at}: {first['msg']}; process {value['pid']} seems to be of another version") from None


def live_jobs(root: Path) -> list[Path]:
    """Job folders below `root` with a live supervisor, newest first."""
    folders = {path.parent.parent for path in root.glob("**/run/*.json") if _lives(path.parent.parent)}
    return sorted(folders, key=lambda folder: -(folder / "run").stat().st_mtime)


def is_job(folder: Path) -> bool:
    """Whether a run ever began in a folder."""
    return _lives(folder) or (folder / "summary.json").exists() or bool(stage_configs(folder))


def _lives(folder: Path) -> bool:
    """Whether a supervisor is alive in a folder. One of another version is, which is said where its run is asked for: a
    list of runs does not end there. A record that cannot be read says nothing."""
    try:
        return bool(read_records(folder))
    except RunError:
        return True
    except OSError:
        return False


def stage_configs(folder: Path) -> list[Path]:
    """config.json of the job itself or of each of its stages."""
    return [path for path in sorted(folder.glob("**/config.json")) if (path.parent / "log").is_dir()]


def known_jobs(root: Path) -> list[Path]:
    """Job folders below `root`, whether live or not, the newest first."""
    locks = sorted(root.glob("**/.lock"), key=lambda path: -path.parent.stat().st_mtime)
    return [path.parent for path in locks if is_job(path.parent)]


def finished_step(stage_folder: Path) -> int:
    """Step at which a stage finished; -1 if it did not."""
    return _finished(stage_folder)[0]


def finished_summary(stage_folder: Path) -> dict[str, Any]:
    """Summary of a stage that finished, perhaps with fewer steps than now; empty if it never finished."""
    return _finished(stage_folder)[1]


def _finished(stage_folder: Path) -> tuple[int, dict[str, Any]]:
    """Step and summary. With a damaged file a stage has not finished: it runs again, from its last checkpoint."""
    value = files.read_json(stage_folder / "finished.json")
    found = value if isinstance(value, dict) else {}
    step, summary = found.get("step"), found.get("summary")
    if type(step) is not int or not isinstance(summary, dict) or not _is_seconds(summary.get("wall_seconds")):
        return -1, {}
    return step, summary


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def mark_finished(stage_folder: Path, step: int, part: dict[str, Any]) -> None:
    files.write_json(stage_folder / "finished.json", {"step": step, "summary": part})


def fresh_name(config: Config, stamp: str) -> Config:
    """For continue_from_checkpoint: false, a new name beside existing folders."""
    folder = make_folder(config)
    if config.continue_from_checkpoint or not folder.exists() or not any(os.scandir(folder)):
        return config
    return config.model_copy(update={"name": f"{config.name}_{stamp}"})


def stage_folder(config: Config) -> Path:
    return make_plan(config).job_dir
