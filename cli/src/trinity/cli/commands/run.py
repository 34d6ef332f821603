"""`trinity run`: start the runner for the mode of a YAML."""

import importlib
import os
import sys
from typing import Annotated

import typer

from trinity.cli.commands.check import check
from trinity.commands import (
    AlgorithmOption,
    AnswerOption,
    Arguments,
    ConfigOption,
    DataOption,
    ModelOption,
    PluginDirs,
    PromptOption,
    SubsetOption,
    command,
    group,
)
from trinity.commands.request import own_yaml, request, say_notices
from trinity.plugins import satellites
from trinity.reading.errors import RunError
from trinity.runtime import logs, waits

app = group()


@command(app, "run")
def run(
    arguments: Arguments = None,
    config: ConfigOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and show the plan; start nothing")] = False,
    plugin_dir: PluginDirs = None,
    stage: Annotated[str, typer.Option("--stage", help="Only this stage, once those before it are finished")] = "",
    wait: Annotated[
        float | None,
        typer.Option("--wait", min=0, help="Seconds that --stage waits for them; else synchronizer.sync_timeout"),
    ] = None,
    model: ModelOption = "",
    data: DataOption = "",
    subset: SubsetOption = "",
    prompt: PromptOption = "",
    answer: AnswerOption = "",
    algorithm: AlgorithmOption = "",
) -> int:
    """Run what a YAML describes, or train --model on --data without one. Resumes where it stopped."""
    if dry_run and (stage or wait is not None):
        raise RunError("--dry-run shows the plan of all stages and waits for none; leave --stage and --wait out", 2)
    if wait is not None and not stage:
        raise RunError(f"--wait {wait:g}: it is --stage that waits; name one", 2)
    if dry_run:
        return check(arguments, config, False, False, plugin_dir, model, data, subset, prompt, answer, algorithm)
    options = request(config, arguments, plugin_dir, own_yaml(model, data, subset, prompt, answer, algorithm))
    loaded = options.load()
    if stage and loaded.mode not in ("both", "train"):
        raise RunError(f"--stage {stage}: mode {loaded.mode} runs no stages, both and train do", 2)
    say_notices(loaded, sys.stderr)
    if options.text:
        satellites.find("own_data").write_own(options.config, options.text)
    logs.configure("run", level="ERROR")
    if options.plugin_dirs:  # the services look here
        os.environ["TRINITY_PLUGIN_DIRS"] = os.pathsep.join(str(path.absolute()) for path in options.plugin_dirs)
    if loaded.mode in ("both", "train"):
        runner = importlib.import_module("trinity.cli.supervise.stage.supervisor").run
    else:
        runner = satellites.find("modes")(loaded.mode)
    stages = (stage, wait) if stage else ()
    with waits.on_screen(lambda text: print(f"trinity {text}", file=sys.stderr, flush=True)):
        runner(loaded, str(options.config), *stages)
    return 0
