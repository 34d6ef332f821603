"""`trinity serve`: a job's newest weights behind an OpenAI-compatible endpoint, without its YAML."""

from pathlib import Path
from typing import Annotated

import typer

from trinity.commands import Overrides, command, group
from trinity.config import load, make_plan
from trinity.config.schema.algorithm import AlgorithmConfig
from trinity.config.schema.buffer import BufferConfig
from trinity.modes.serve import serve as run
from trinity.reading.errors import RunError
from trinity.reading.find import find_job
from trinity.reading.reader import find_job_stage
from trinity.runtime import logs

app = group()


def _find(
    config: Path | None = None,
    job: Path | None = None,
    record: Annotated[bool, typer.Option("--record", hidden=True)] = False,
) -> Path:
    if record:
        how = "set explorer.record: true and explorer.traffic in a YAML, and start `trinity run --config` with it"
        raise RunError(f"--record: `serve` trains nothing; {how}, as with examples/traffic/sums.yaml", 2)
    return find_job(config, job).absolute()


@command(app, "serve", _find)
def serve(
    folder: Path,
    overrides: Overrides = None,
    adapters: Annotated[
        list[str] | None,
        typer.Option("--adapter", help="NAME=FOLDER: adapters of the base model, by peft; may be given several times"),
    ] = None,
) -> int:
    """Serve a job's newest weights to OpenAI clients, until Ctrl-C. Without options: the newest job here."""
    stage = find_job_stage(job=folder)
    config = load(stage.config_file, overrides or [], plugins_loaded=False)
    changes: dict[str, object] = {"mode": "serve"}
    if make_plan(config).offline:  # no algorithm on a dataset has mode serve, and an endpoint needs neither
        changes |= {"algorithm": AlgorithmConfig(), "buffer": BufferConfig()}
    root = stage.folder  # perhaps moved since the run
    for _ in (*Path(config.project).parts, *Path(config.group).parts, *Path(config.name).parts):
        root = root.parent
    config = config.model_copy(update={**changes, "checkpoint_root_dir": str(root)})
    logs.configure("run", level="ERROR")
    run(config, str(stage.config_file), stage.whole_job(), adapters or [])
    return 0
