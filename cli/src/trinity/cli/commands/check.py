"""`trinity check`: what a YAML would do, and what of it cannot be done here."""

import contextlib
import json
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from trinity import plugins
from trinity.cli.commands.plan_text import describe
from trinity.cli.errors import RunError
from trinity.cli.options import Arguments, ConfigOption, PluginDirs, command, group
from trinity.cli.render import visible
from trinity.cli.supervise.job import check_folder, make_folder
from trinity.config import Config, dump, expand, load, make_plan
from trinity.config.devices import describe_sharing, detect_gpus
from trinity.config.names import EXPERIENCE_OPERATORS, REWARD_FUNCTIONS, WORKFLOWS
from trinity.data.task_pipeline import check_task_pipeline
from trinity.plugins.environments import built_in_environments, installed_environments

app = group()


@dataclass(frozen=True)
class Request:
    """The options of `run` and `check`."""

    config: Path
    overrides: list[str]
    plugin_dirs: list[Path]

    def load(self) -> Config:
        """The configuration. Plugins are imported first: the YAML may name what they register."""
        try:
            plugins.load(self.plugin_dirs)
            installed_environments()  # broken ones are said before the environment service meets them
        except plugins.PluginError as error:
            raise RunError(str(error), code=2) from None
        kinds: list[tuple[str, dict[str, Any], Collection[str]]] = [
            ("workflow", plugins.WORKFLOWS, WORKFLOWS),
            ("reward function", plugins.REWARD_FUNCTIONS, REWARD_FUNCTIONS),
            ("experience operator", plugins.EXPERIENCE_OPERATORS, EXPERIENCE_OPERATORS),
            ("environment", plugins.ENVIRONMENTS, _environments() if plugins.ENVIRONMENTS else ()),
        ]
        for kind, own, builtin in kinds:
            for name in sorted(own.keys() & {*builtin}):
                file = sys.modules[own[name].__module__].__file__
                raise RunError(f"{file}: {name!r} is the name of a built-in {kind}; choose another", code=2)
        config = load(self.config, self.overrides, checks=[check_task_pipeline])
        check_folder(config, str(self.config))
        return config


def _environments() -> Collection[str]:
    """Imported where a plugin has some: they take a while."""
    return {*built_in_environments(), *installed_environments()}


def request(config: Path | None, arguments: list[str] | None, plugin_dirs: list[Path] | None) -> Request:
    """The YAML is --config, or the first argument that is no override."""
    overrides = list(arguments or [])
    if config is None and overrides and ("=" not in overrides[0] or Path(overrides[0]).is_file()):
        config = Path(overrides.pop(0))
    if config is None:
        raise RunError("no YAML; give it as --config FILE", code=2)
    listed = os.environ.get("TRINITY_PLUGIN_DIRS", "").replace(",", os.pathsep).split(os.pathsep)
    return Request(config, overrides, [*(plugin_dirs or []), *(Path(folder) for folder in listed if folder)])


def say_notices(config: Config, file: TextIO) -> None:
    for notice in config.notices:
        print(f"note: {visible(str(notice))}", file=file)


def _what_is_there(mode: str, steps: int) -> str:
    """bench and serve train nothing, and explore learns the number of steps from the run that it joins."""
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
) -> int:
    """Check a YAML and say what it would do. Needs no GPU, no network, no model and no data."""
    asked = request(config, arguments, plugin_dir)
    loaded = asked.load()
    stages = expand(loaded)
    if loaded.mode in ("bench", "serve"):  # about what the last stage made
        stages = [stages[-1].model_copy(update={"mode": loaded.mode})]
    if as_json:
        say_notices(loaded, sys.stderr)
        print(json.dumps(dump(loaded), indent=1))
        with contextlib.redirect_stdout(sys.stderr):
            return _deep(loaded, stages, str(asked.config)) if deep else 0
    gpus = detect_gpus()
    for stage in stages:
        print(describe(make_plan(stage)))
        if sharing := describe_sharing(make_plan(stage), gpus):
            print(f"  on this machine: {sharing}")
    if names := ", ".join(installed_environments()):
        print(f"environments of installed packages: {names}")
    say_notices(loaded, sys.stdout)
    return _deep(loaded, stages, str(asked.config)) if deep else 0


def _deep(loaded: Config, stages: list[Config], source: str) -> int:
    """Look at model, data and this machine; the exit code. Raises ConfigError."""
    from trinity.cli.supervise.preflight import check_deeper, check_stages, machine_problems
    from trinity.data.task_pipeline import describe as describe_tasks

    for name, (steps, tasks) in check_stages(loaded, source).items():
        for line in describe_tasks(tasks, with_paths=False):
            print(f"{name}: {line}")
        print(f"{name}: {_what_is_there(loaded.mode, steps)}")
    for stage in stages:
        plan = make_plan(stage.model_copy(update={"model": loaded.model}))
        for sentence in check_deeper(plan, source, make_folder(loaded)):
            print(f"{stage.name}: {sentence}")
    unfit = [f"{stage.name}: not on this machine: {problem}"
             for stage in stages for problem in machine_problems(make_plan(stage))]  # fmt: skip
    print(*unfit, sep="\n", end="\n" if unfit else "")
    return 2 if unfit else 0  # as `run` would end
