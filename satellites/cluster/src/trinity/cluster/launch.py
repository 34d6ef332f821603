"""`trinity launch slurm`: one batch script for a run, submitted for the run itself, and for its further machines.

The run's job has one node, with NATS, services and trainer. Further nodes of the trainer are a job array of one node
each, and explorers another, so Slurm may pre-empt and requeue each of them separately. They find NATS by
<job>/run/main.json, which `trinity run` writes.

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
    own=(mode=explore explorer.name="$name")
    if [[ $SLURM_JOB_NAME == {trainers} ]]; then
        name=trainer-$SLURM_ARRAY_TASK_ID
        own=(mode=train_node cluster.node_name="$name")
    fi
    new_certificates "$name" || exit
    # Not by srun: when it is asked to end, it kills its tasks, and the explorer could not hand its own back.
    TRINITY_IDENTITY=$identity/$name exec "${{trinity[@]}}" "${{run[@]}}" \\
        "${{own[@]}}" synchronizer.sync_timeout={wait}
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
    waiting=(--state=PENDING)  # running explorers end with a finished run by themselves
    (( code )) && waiting=()
    scancel --quiet "${{waiting[@]}}" --user="$(id -un)" --name={arrays}
fi
"""


@dataclass(frozen=True)
class Jobs:
    """The jobs to submit. `shared`: options of sbatch for all nodes; `exploring` replaces some for explorers."""

    asked: Request
    config: Config
    nodes: int
    trainer_nodes: int = 1
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
        counts = {"trainer": self.trainer_nodes - 1, "explorer": self.nodes - self.trainer_nodes}
        for kind, number in counts.items():
            if not number:
                continue
            own: dict[str, str | None] = {
                "job-name": f"{self.name}-{kind}s",
                "array": f"1-{number}",
                "dependency": f"after:{after}",
                "kill-on-invalid-dep": "yes",
                "output": f"{self.folder}/{kind}-%a.out",
                **(self.exploring if kind == "explorer" else {}),
            }
            found.append(["sbatch", "--parsable", *map(_option, own, own.values()), str(self.script_file)])
        return found

    @property
    def arrays(self) -> list[str]:
        """The names of the job arrays of further machines."""
        counts = {"trainers": self.trainer_nodes - 1, "explorers": self.nodes - self.trainer_nodes}
        return [f"{self.name}-{kind}" for kind, count in counts.items() if count]

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
        if self.trainer_nodes > 1:
            overrides.append(f"cluster.node_num={self.trainer_nodes}")
        run = ["run", "--config", str(self.asked.config.absolute()), *plugins, *overrides]
        explorers = self.nodes > self.trainer_nodes
        return _SCRIPT.format(
            title=f"Run {self.name.removeprefix('trinity-')} on {self.nodes} node(s)",
            commands="\n".join(f"#   {shlex.join(one)}" for one in self.submit()),
            directives="\n".join(f"#SBATCH {_directive(key, value)}" for key, value in directives.items()),
            trinity=shlex.join([sys.executable, "-m", "trinity.cli.main"]),
            run=shlex.join(run),
            identity=shlex.quote(str(self.folder / "identity")),
            job=self.name,
            trainers=f"{self.name}-trainers",
            wait=_WAIT_SECONDS,
            servers=" ".join(_SERVERS),
            mode="mode=train" if explorers else "",
            ending=_ENDING.format(arrays=",".join(self.arrays)) if self.arrays else "",
        )


@command(app, "slurm")
def slurm(
    arguments: Arguments = None,
    config: ConfigOption = None,
    nodes: Annotated[int, typer.Option("--nodes", "-N", help="The first trains, the others explore")] = 1,
    trainer_nodes: Annotated[
        int | None, typer.Option("--trainer-nodes", help="Nodes of them that train together; else cluster.node_num")
    ] = None,
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
    shared = {key: value for key, value in named.items() if value} | _others("--sbatch", options or [])
    asked = request(config, arguments, plugin_dir)
    loaded = asked.load()
    _check(loaded)
    training = loaded.cluster.nodes if trainer_nodes is None else trainer_nodes
    if not 1 <= training <= nodes:
        key = "--trainer-nodes" if trainer_nodes is not None else "cluster.node_num"
        raise RunError(f"--nodes: is {nodes}, but {training} train ({key}); give 1 to {nodes} of them", 2)
    if nodes == training and explorer_options:
        problem = f"is given, but --nodes {nodes} has no explorer's node; give --nodes {nodes + 1} or more"
        raise RunError(f"--explorer-sbatch: {problem}", 2)
    jobs = Jobs(asked, loaded, nodes, training, shared, _others("--explorer-sbatch", explorer_options or []))
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
    if queued:  # machines that outlived their run
        _slurm(["scancel", f"--user={getpass.getuser()}", f"--name={jobs.name}-explorers,{jobs.name}-trainers"])
        _until_gone(jobs)
    make_private(jobs.folder.parent)
    make_private(jobs.folder)
    identities = jobs.folder / "identity"
    if not (identities / "ca" / "issued.json").is_file():
        certs.init(identities)
    for kind, number in (("explorer", jobs.nodes - jobs.trainer_nodes), ("trainer", jobs.trainer_nodes - 1)):
        for name in (f"{kind}-{index}" for index in range(1, number + 1)):
            if not (identities / name).is_dir():
                certs.issue(kind, name, identities)
    files.write_atomic(jobs.script_file, script.encode(), mode=0o700)
    main = _slurm(jobs.submit()[0]).partition(";")[0]
    submitted, said = [main], [f"job {main}: NATS, services and trainer; output in {jobs.folder}/run.out"]
    try:
        for name, command in zip(jobs.arrays, jobs.submit(main)[1:], strict=True):
            array, kind = _slurm(command).partition(";")[0], name.rpartition("-")[2].removesuffix("s")
            number = jobs.trainer_nodes - 1 if kind == "trainer" else jobs.nodes - jobs.trainer_nodes
            what = f"{number} explorer(s)" if kind == "explorer" else f"{number} further machine(s) of the trainer"
            said.append(f"job {array}: {what}; output in {jobs.folder}/{kind}-*.out")
            submitted.append(array)
    except RunError:
        _slurm(["scancel", *submitted])
        raise
    names = ",".join([jobs.name, *jobs.arrays])
    return "\n".join([*said, f"all ends by: scancel --name={names}", "the same command resumes the run"])


def _queued(jobs: Jobs) -> list[list[str]]:
    """Id, state and name of the run's jobs that have not ended."""
    names = f"--name={jobs.name},{jobs.name}-explorers,{jobs.name}-trainers"
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
