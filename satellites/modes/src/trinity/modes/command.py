"""`trinity serve`: a job's newest weights behind an OpenAI-compatible endpoint, without its YAML."""

import os
import sys
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
    record: Annotated[
        bool, typer.Option("--record", help="Run the YAML: serve, record calls, and learn from their rewards")
    ] = False,
) -> Path:
    if record:
        given = [one for one in sys.argv[sys.argv.index("serve") + 1 :] if one != "--record"]
        changes = any(one.startswith("explorer.traffic") for one in given)
        if config is None or not (changes or load(config, plugins_loaded=False).explorer.traffic):
            what = "give --config FILE, a YAML with explorer.traffic, such as examples/traffic/sums.yaml"
            raise RunError(f"--record: serves, records and trains; {what}", 2)
        os.execv(sys.executable, [sys.executable, "-m", "trinity.cli.main", "run", *given, "explorer.record=true"])
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
