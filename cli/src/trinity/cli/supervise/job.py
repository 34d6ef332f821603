"""The job folder: who owns it, what runs in it, which stages are done.

<job>/.lock                 held by the supervisor of mode both or train
<job>/run/<name>.json       one live supervisor: its pid and processes
<job>/nats/                 store of the embedded nats-server
<job>/[<stage>/]config.json log/ monitor/ weights/ global_step_<n>/ finished.json
<job>/summary.json
"""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trinity.config import Config, make_plan
from trinity.runtime import files
from trinity.runtime.names import run_id
from trinity.runtime.process import FileLock, is_alive


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
    nats_url: str
    processes: list[ProcessRecord] = field(default_factory=list)


class Job:
    """The folder of one run, or of all stages of a run."""

    def __init__(self, config: Config) -> None:
        self.folder = make_folder(config)
        self.token = run_id(config.project, config.name, config.group)

    def lock(self, name: str = "") -> FileLock:
        """The lock of the run itself, or of one joining explorer."""
        return FileLock(self.folder / (f".lock-{name}" if name else ".lock"))

    def write_record(self, name: str, record: SupervisorRecord) -> None:
        files.write_json(self.folder / "run" / f"{name}.json", asdict(record))

    def remove_record(self, name: str) -> None:
        (self.folder / "run" / f"{name}.json").unlink(missing_ok=True)

    def taken_gpus(self) -> set[str]:
        """GPUs of this machine that other commands of the run hold."""
        others = [record for record in self.records().values() if record.pid != os.getpid()]
        return {card for record in others for process in record.processes for card in process.gpus}

    def records(self) -> dict[str, SupervisorRecord]:
        return read_records(self.folder)


def make_folder(config: Config) -> Path:
    """<root>/<project>/[group/]<name>, absolute."""
    parts = [config.project, *([config.group] if config.group else []), *config.name.split("/")]
    return Path(config.checkpoint_root_dir).expanduser().absolute().joinpath(*parts)


def read_records(folder: Path) -> dict[str, SupervisorRecord]:
    """Supervisors alive in a job folder, by name."""
    found: dict[str, SupervisorRecord] = {}
    for path in sorted((folder / "run").glob("*.json")):
        value = files.read_json(path)
        if isinstance(value, dict) and is_alive(int(value.get("pid", 0))):
            processes = [ProcessRecord(**process) for process in value.pop("processes", [])]
            found[path.stem] = SupervisorRecord(**value, processes=processes)
    return found


def live_jobs(root: Path) -> list[Path]:
    """Job folders below `root` with a live supervisor, newest first."""
    folders = {path.parent.parent for path in root.glob("**/run/*.json") if read_records(path.parent.parent)}
    return sorted(folders, key=lambda folder: -(folder / "run").stat().st_mtime)


def is_job(folder: Path) -> bool:
    """Whether a run ever began in a folder."""
    return bool(read_records(folder)) or (folder / "summary.json").exists() or bool(stage_configs(folder))


def stage_configs(folder: Path) -> list[Path]:
    """config.json of the job itself or of each of its stages."""
    return [path for path in sorted(folder.glob("**/config.json")) if (path.parent / "log").is_dir()]


def known_jobs(root: Path) -> list[Path]:
    """Job folders below `root`, whether live or not, the newest first."""
    locks = sorted(root.glob("**/.lock"), key=lambda path: -path.parent.stat().st_mtime)
    return [path.parent for path in locks if is_job(path.parent)]


def finished_step(stage_folder: Path) -> int:
    """Step at which a stage finished; -1 if it did not."""
    value = files.read_json(stage_folder / "finished.json")
    return int(value["step"]) if isinstance(value, dict) else -1


def finished_summary(stage_folder: Path) -> dict[str, Any]:
    """Summary of a stage that finished, perhaps with fewer steps than now; empty if it never finished."""
    value = files.read_json(stage_folder / "finished.json")
    return dict(value["summary"]) if isinstance(value, dict) else {}


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
