"""`trinity launch slurm`: one batch script for a run, submitted twice: for the run itself, and for its explorers.

The run's job has one node, with NATS, services and trainer. The explorers are a job array of one node each, so Slurm
may pre-empt and requeue each of them separately. They find NATS by <job>/run/main.json, which `trinity run` writes.

<job>/slurm/run.sh     the script
<job>/slurm/*.out      what the jobs print
<job>/slurm/identity/  an authority and its identities (`trinity certs`), of mode 0600
"""

import getpass
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from trinity.cluster.certs import certs
from trinity.commands import Arguments, ConfigOption, PluginDirs, command, group
from trinity.commands.request import Request, request, say_notices
from trinity.config import Config
from trinity.reading.errors import RunError
from trinity.reading.job import make_folder, make_private
from trinity.runtime import files
from trinity.runtime.names import run_id

app = group("Run on a cluster: the jobs of a run, written and submitted.")
app.callback()(lambda: None)  # else typer takes a group's only command for the group

# Slurm's own names of the options that the script needs for itself.
_RESERVED = (
    "array", "chdir", "dependency", "job-name", "nodes", "no-requeue", "ntasks", "open-mode", "output", "requeue",
    "signal", "wrap",
)  # fmt: skip
_OPTION = re.compile(r"([a-z][a-z0-9-]*)(?:=(.+))?")
_NAME = re.compile(r"[\w.@+-]+(,[\w.@+-]+)*")
_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_GRES = re.compile(r"[\w.:/,-]+")
_GPUS = re.compile(r"([\w.-]+:)?[1-9]\d*")
_MOST_NODES = 10_000
_WAIT_SECONDS = 3_000_000  # an explorer waits for its run until Slurm ends it
_TERM_SECONDS = 60  # before the time limit
_CANCEL_SECONDS = 120.0
_OF_OTHER_RUNS = ("TRINITY_IDENTITY", "TRINITY_IDENTITY_FOLDER", "TRINITY_NATS_URL")
_SERVERS = ("buffer", "environment", "explorer", "sync", "trainer", "nats")

_SCRIPT = """\
#!/bin/bash
# {title}, written by `trinity launch slurm` (docs/deploy.md). Submitted as:
{commands}
{directives}

umask 077
export TRINITY_HOST
trinity=({trinity})
run=({run})
identity={identity}

# The address at which other nodes reach this one.
TRINITY_HOST=$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
new_certificates() {{
    "${{trinity[@]}}" certs rotate --folder "$identity" --host "$TRINITY_HOST" --host localhost --host 127.0.0.1 "$@"
}}

if [[ -n ${{SLURM_ARRAY_TASK_ID:-}} ]]; then
    if [[ -z $(squeue --noheader --user="$(id -un)" --name={job}) ]]; then
        echo "the run's own job is not in the queue; there is nothing to explore"
        exit 0
    fi
    name=explorer-$SLURM_ARRAY_TASK_ID
    new_certificates "$name" || exit
    # Not by srun: when it is asked to end, it kills its tasks, and the explorer could not hand its own back.
    TRINITY_IDENTITY=$identity/$name exec "${{trinity[@]}}" "${{run[@]}}" \\
        mode=explore explorer.name="$name" synchronizer.sync_timeout={wait}
fi

new_certificates {servers} || exit
TRINITY_IDENTITY=$identity "${{trinity[@]}}" "${{run[@]}}" {mode} &
pid=$!
trap 'kill -TERM "$pid"' TERM
while wait "$pid"; code=$?; kill -0 "$pid" 2>/dev/null; do :; done
{ending}exit "$code"
"""

_ENDING = """\
restarts=$(scontrol --oneliner show job "$SLURM_JOB_ID" | sed -n 's/.* Restarts=\\([0-9]*\\).*/\\1/p')
if (( ${{restarts:-0}} <= ${{SLURM_RESTART_COUNT:-0}} )); then  # else Slurm requeues it, and explorers wait for it
    waiting=(--state=PENDING)  # those that explore end with a finished run by themselves
    (( code )) && waiting=()
    scancel --quiet "${{waiting[@]}}" --user="$(id -un)" --name={explorers}
fi
"""


@dataclass(frozen=True)
class Jobs:
    """The jobs to submit. `shared`: options of sbatch for all nodes; `exploring` replaces some for explorers."""

    asked: Request
    config: Config
    nodes: int
    shared: Mapping[str, str | None] = field(default_factory=dict)
    exploring: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return make_folder(self.config) / "slurm"

    @property
    def name(self) -> str:
        """The name of the run's job: letters, digits, `_` and `-`."""
        return f"trinity-{run_id(self.config.project, self.config.name, self.config.group)}"

    @property
    def script_file(self) -> Path:
        return self.folder / "run.sh"

    def submit(self, after: str = "ID") -> list[list[str]]:
        """The commands: of the run, and of the explorers if there are any. `after`: id of the run's job."""
        found = [["sbatch", "--parsable", str(self.script_file)]]
        if self.nodes > 1:
            own = {
                "job-name": f"{self.name}-explorers",
                "array": f"1-{self.nodes - 1}",
                "dependency": f"after:{after}",
                "kill-on-invalid-dep": "yes",
                "output": f"{self.folder}/explorer-%a.out",
                **self.exploring,
            }
            found.append(["sbatch", "--parsable", *map(_option, own, own.values()), str(self.script_file)])
        return found

    def script(self) -> str:
        """The text of the batch script. RunError for a path that Slurm cannot take."""
        directives = {
            "job-name": self.name,
            "chdir": _slurm_path("the working directory", Path.cwd()),
            "output": f"{_slurm_path('checkpoint_root_dir', self.folder)}/run.out",
            "open-mode": "append",  # a requeued job writes to the same file
            "nodes": "1",
            "ntasks": "1",
            "requeue": None,
            "signal": f"B:TERM@{_TERM_SECONDS}",
            **self.shared,
        }
        root = Path(self.config.checkpoint_root_dir).expanduser().absolute()
        plugins = [f"--plugin-dir={folder.absolute()}" for folder in self.asked.plugin_dirs]
        overrides = [*self.asked.overrides, f"checkpoint_root_dir={json.dumps(str(root), ensure_ascii=False)}"]
        run = ["run", "--config", str(self.asked.config.absolute()), *plugins, *overrides]
        explorers = self.nodes > 1
        return _SCRIPT.format(
            title=f"Run {self.name.removeprefix('trinity-')} on {self.nodes} node(s)",
            commands="\n".join(f"#   {shlex.join(one)}" for one in self.submit()),
            directives="\n".join(f"#SBATCH {_directive(key, value)}" for key, value in directives.items()),
            trinity=shlex.join([sys.executable, "-m", "trinity.cli.main"]),
            run=shlex.join(run),
            identity=shlex.quote(str(self.folder / "identity")),
            job=self.name,
            explorers=f"{self.name}-explorers",
            wait=_WAIT_SECONDS,
            servers=" ".join(_SERVERS),
            mode="mode=train" if explorers else "",
            ending=_ENDING.format(explorers=f"{self.name}-explorers") if explorers else "",
        )


@command(app, "slurm")
def slurm(
    arguments: Arguments = None,
    config: ConfigOption = None,
    nodes: Annotated[int, typer.Option("--nodes", "-N", help="The first trains, the others explore")] = 1,
    partition: Annotated[str, typer.Option("--partition", "-p", help="Of all nodes")] = "",
    account: Annotated[str, typer.Option("--account", "-A", help="Who is charged")] = "",
    time_limit: Annotated[str, typer.Option("--time", "-t", help="Time limit, as Slurm writes it: 1-12:00:00")] = "",
    gpus: Annotated[str, typer.Option("--gpus-per-node", help="Number of GPUs, or type:number")] = "",
    gres: Annotated[str, typer.Option("--gres", help="On clusters that count GPUs as gpu:4")] = "",
    cpus: Annotated[int | None, typer.Option("--cpus-per-task", help="CPU cores of each node")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--sbatch", help="Any other option of sbatch: qos=high, exclusive")
    ] = None,
    explorer_options: Annotated[
        list[str] | None, typer.Option("--explorer-sbatch", help="The same, only for explorers: partition=preempt")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script; write and submit nothing")] = False,
    plugin_dir: PluginDirs = None,
) -> str:
    """Write and submit the jobs of a run; the same command resumes it. Overrides of the YAML follow `--`."""
    named = {
        "partition": _matching("--partition", partition, _NAME, "names of letters, digits, `_`, `.`, `-`"),
        "account": _matching("--account", account, _NAME, "a name of letters, digits, `_`, `.`, `-`"),
        "time": _matching("--time", time_limit, _TIME, "minutes, hours:minutes:seconds or days-hours, as 1-12:00:00"),
        "gpus-per-node": _matching("--gpus-per-node", gpus, _GPUS, "a number or type:number, as 4 or a100:4"),
        "gres": _matching("--gres", gres, _GRES, "name:type:number, as gpu:4"),
        "cpus-per-task": _matching("--cpus-per-task", "" if cpus is None else str(cpus), _GPUS, "1 or more"),
    }
    if not 1 <= nodes <= _MOST_NODES:
        raise RunError(f"--nodes: is {nodes}; give 1 to {_MOST_NODES}", 2)
    if nodes == 1 and explorer_options:
        raise RunError("--explorer-sbatch: is given, but --nodes 1 has no explorer's node; give --nodes 2 or more", 2)
    shared = {key: value for key, value in named.items() if value} | _others("--sbatch", options or [])
    asked = request(config, arguments, plugin_dir)
    loaded = asked.load()
    _check(loaded)
    jobs = Jobs(asked, loaded, nodes, shared, _others("--explorer-sbatch", explorer_options or []))
    script = jobs.script()
    if dry_run:
        return script.rstrip("\n")
    say_notices(loaded, sys.stderr)
    return _submit(jobs, script)


def _check(config: Config) -> None:
    """RunError for what cannot be one run that later jobs resume, or that finds itself by other settings."""
    if config.mode not in ("both", "train"):
        raise RunError(f"mode: is {config.mode!r}; launch starts a whole run: leave it out, or give both", 2)
    if not config.continue_from_checkpoint:
        raise RunError("continue_from_checkpoint: is false, so each job would begin a new run; leave it out", 2)
    for name in _OF_OTHER_RUNS:
        if os.environ.get(name):
            raise RunError(f"{name}: is set, but launch makes the run's identities and NATS; unset it", 2)


def _submit(jobs: Jobs, script: str) -> str:
    """Submit both jobs, or none. RunError if the run is in the queue, or Slurm refuses."""
    queued = _queued(jobs)
    if own := [f"{job} ({state})" for job, state, name in queued if name == jobs.name]:
        raise RunError(f"the run is in the queue as job {', '.join(own)}; end it by `scancel --name={jobs.name}`")
    if queued:  # explorers that outlived their run
        _slurm(["scancel", f"--user={getpass.getuser()}", f"--name={jobs.name}-explorers"])
        _until_gone(jobs)
    make_private(jobs.folder.parent)
    make_private(jobs.folder)
    identities = jobs.folder / "identity"
    if not (identities / "ca" / "ca.key").is_file():
        certs.init(identities)
    for index in range(1, jobs.nodes):
        if not (identities / f"explorer-{index}").is_dir():
            certs.issue("explorer", f"explorer-{index}", identities)
    files.write_atomic(jobs.script_file, script.encode(), mode=0o700)
    main = _slurm(jobs.submit()[0]).partition(";")[0]
    said = [f"job {main}: NATS, services and trainer; output in {jobs.folder}/run.out"]
    try:
        for command in jobs.submit(main)[1:]:
            array = _slurm(command).partition(";")[0]
            said.append(f"job {array}: {jobs.nodes - 1} explorer(s); output in {jobs.folder}/explorer-*.out")
    except RunError:
        _slurm(["scancel", main])
        raise
    names = ",".join([jobs.name, *([f"{jobs.name}-explorers"] if jobs.nodes > 1 else [])])
    return "\n".join([*said, f"all ends by: scancel --name={names}", "the same command resumes the run"])


def _queued(jobs: Jobs) -> list[list[str]]:
    """Id, state and name of the run's jobs that have not ended."""
    names = f"--name={jobs.name},{jobs.name}-explorers"
    listing = _slurm(["squeue", "--noheader", f"--user={getpass.getuser()}", names, "--format=%i %T %j"])
    return [line.split() for line in listing.splitlines()]


def _until_gone(jobs: Jobs) -> None:
    deadline = time.monotonic() + _CANCEL_SECONDS
    while _queued(jobs):
        if time.monotonic() > deadline:
            raise RunError(f"explorers of an earlier job have not ended within {_CANCEL_SECONDS:g} s; try again later")
        time.sleep(1)


def _slurm(command: Sequence[str]) -> str:
    """Returns the output of a command of Slurm. Raises RunError with the command's message if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        raise RunError(f"{command[0]} is not on PATH: use a machine that submits jobs, or --dry-run", 2) from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{command[0]} did not answer within 120 s; is slurmctld there?") from None
    if done.returncode:
        raise RunError(f"{command[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.strip()


def _matching(name: str, value: str, pattern: re.Pattern[str], fix: str) -> str:
    if value and not pattern.fullmatch(value):
        raise RunError(f"{name}: is {value!r}; give {fix}", 2)
    return value


def _others(name: str, given: Sequence[str]) -> dict[str, str | None]:
    """Options of sbatch by key; None: one without a value."""
    found: dict[str, str | None] = {}
    for one in given:
        parts = _OPTION.fullmatch(one.removeprefix("--"))
        if parts is None or not _fits(one):
            raise RunError(f"{name}: is {one!r}; give KEY=VALUE or KEY as sbatch has it, without quotes", 2)
        if parts[1] in _RESERVED:
            raise RunError(f"{name}: is {one!r}, but the script needs --{parts[1]} for itself; leave it out", 2)
        found[parts[1]] = parts[2]
    return found


def _slurm_path(what: str, path: Path) -> str:
    """A path for sbatch, which knows no escape for some characters."""
    if not _fits(str(path)) or "%" in str(path):
        problem = 'has \\, ", % or a line break in it, which Slurm does not take; use another folder'
        raise RunError(f"{what}: {str(path)!r} {problem}", 2)
    return str(path)


def _fits(text: str) -> bool:
    """Tells if sbatch takes a text between double quotes in a line of #SBATCH, which no shell reads."""
    return text.isprintable() and not {'"', "\\"} & set(text)


def _directive(key: str, value: str | None) -> str:
    return _option(key, value if value is None or _GRES.fullmatch(value) else f'"{value}"')


def _option(key: str, value: str | None) -> str:
    return f"--{key}" if value is None else f"--{key}={value}"
