"""`trinity check`: the plan of a YAML, and the parts of it that cannot run here."""

import contextlib
import json
import sys
from typing import Annotated

import typer

from trinity.cli.commands.plan_text import describe
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
from trinity.config import Config, dump, expand, make_plan
from trinity.config.devices import describe_sharing
from trinity.plugins import satellites
from trinity.plugins.environments import installed_environments
from trinity.reading.job import make_folder
from trinity.runtime.devices import detect_gpus

app = group()


def _what_is_there(mode: str, steps: int) -> str:
    """Modes bench and serve train nothing; mode explore learns the number of steps from the run that it joins."""
    found = "model is there" if mode == "serve" else "model and data are there"
    return f"{found}; {steps} optimizer steps" if mode in ("both", "train") else found


@command(app, "check")
def check(
    arguments: Arguments = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the resolved configuration")] = False,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Look at model, data and this machine too; exit code 2 if it cannot run here"),
    ] = False,
    plugin_dir: PluginDirs = None,
    model: ModelOption = "",
    data: DataOption = "",
    subset: SubsetOption = "",
    prompt: PromptOption = "",
    answer: AnswerOption = "",
    algorithm: AlgorithmOption = "",
) -> int:
    """Check a YAML and say what it would do. Needs no GPU, no network, no model and no data."""
    options = request(config, arguments, plugin_dir, own_yaml(model, data, subset, prompt, answer, algorithm))
    loaded = options.load()
    stages = expand(loaded)
    if loaded.mode in ("bench", "serve"):  # about what the last stage made
        stages = [stages[-1].model_copy(update={"mode": loaded.mode})]
    if as_json:
        say_notices(loaded, sys.stderr)
        print(json.dumps(dump(loaded), indent=1))
        with contextlib.redirect_stdout(sys.stderr):
            return _deep(loaded, stages, str(options.config)) if deep else 0
    gpus = detect_gpus()
    for stage in stages:
        print(describe(make_plan(stage)))
        if sharing := describe_sharing(make_plan(stage), gpus):
            print(f"  on this machine: {sharing}")
    if names := ", ".join(installed_environments()):
        print(f"environments of installed packages: {names}")
    say_notices(loaded, sys.stdout)
    return _deep(loaded, stages, str(options.config)) if deep else 0


def _deep(loaded: Config, stages: list[Config], source: str) -> int:
    """Checks model, data and this machine. Returns the exit code; raises ConfigError."""
    from trinity.cli.supervise.checks.disk import disk_advice, disk_problems
    from trinity.cli.supervise.checks.preflight import check_stages, machine_problems
    from trinity.cli.supervise.phases import phase
    from trinity.runtime import waits

    said = waits.on_screen(lambda text: print(f"trinity {text}", file=sys.stderr, flush=True))
    with phase("reads model and data"), said:
        checked = check_stages(loaded, source)
    for name, (steps, report) in checked.items():
        for line in report:
            print(f"{name}: {line}")
        print(f"{name}: {_what_is_there(loaded.mode, steps)}")
    deeper = satellites.find("deep_check")
    for stage in stages if deeper else []:
        plan = make_plan(stage.model_copy(update={"model": loaded.model}))
        for sentence in deeper.check_deeper(plan, source, make_folder(loaded)):
            print(f"{stage.name}: {sentence}")
    if not deeper:
        print(f"prompts, environments and services are not tried: that is in {satellites.missing('deep_check')}")
    plans = {stage.name: make_plan(stage) for stage in stages}
    full = {name: list(disk_problems(plan)) for name, plan in plans.items()}
    unfit = [f"{name}: not on this machine: {problem}"
             for name, plan in plans.items() for problem in (*machine_problems(plan), *full[name])]  # fmt: skip
    for sentence in (f"{name}: {said}" for name, plan in plans.items() if not full[name] for said in disk_advice(plan)):
        print(f"warning: {sentence}")
    print(*unfit, sep="\n", end="\n" if unfit else "")
    return 2 if unfit else 0  # as `run` would end
