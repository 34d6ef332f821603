"""The commands `run`, `check`, `status`, `log` and `view`."""

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from trinity import plugins
from trinity.cli.errors import RunError, ending_well
from trinity.config import Config, expand, load, make_plan
from trinity.config.names import EXPERIENCE_OPERATORS, REWARD_FUNCTIONS, WORKFLOWS
from trinity.data.task_pipeline import check_task_pipeline


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
        except plugins.PluginError as error:
            raise RunError(str(error), code=2) from None
        taken = {*plugins.WORKFLOWS} & {*WORKFLOWS} | {*plugins.REWARD_FUNCTIONS} & {*REWARD_FUNCTIONS}
        taken |= {*plugins.EXPERIENCE_OPERATORS} & {*EXPERIENCE_OPERATORS}
        if taken:
            raise RunError(f"a plugin registers {min(taken)!r}, the name of a built-in one; choose another", code=2)
        return load(self.config, self.overrides, checks=[check_task_pipeline])


def request(config: Path | None, arguments: list[str] | None, plugin_dirs: list[Path] | None) -> Request:
    """The YAML is --config, or the first argument that is no override."""
    overrides = list(arguments or [])
    if config is None and overrides and ("=" not in overrides[0] or Path(overrides[0]).is_file()):
        config = Path(overrides.pop(0))
    if config is None:
        print("trinity: no YAML; give it as --config FILE", file=sys.stderr)
        sys.exit(2)
    listed = os.environ.get("TRINITY_PLUGIN_DIRS", "").replace(",", os.pathsep).split(os.pathsep)
    return Request(config, overrides, [*(plugin_dirs or []), *(Path(folder) for folder in listed if folder)])


def run_command(asked: Request) -> int:
    def action() -> int:
        from trinity.runtime import logs

        config, source = asked.load(), str(asked.config)
        _say_notices(config, sys.stderr)
        logs.configure("run", level="ERROR")
        if asked.plugin_dirs:  # the services look here
            os.environ["TRINITY_PLUGIN_DIRS"] = os.pathsep.join(str(path.absolute()) for path in asked.plugin_dirs)
        _RUNNERS[config.mode](config, source)
        return 0

    return ending_well(action)


def _say_notices(config: Config, file: TextIO) -> None:
    for notice in config.notices:
        print(f"note: {notice}", file=file)


def _supervise(config: Config, source: str) -> None:
    from trinity.cli.supervise.supervisor import run

    run(config, source)


def _join(config: Config, source: str) -> None:
    from trinity.cli.supervise.join import join

    join(config, source)


def _bench(config: Config, source: str) -> None:
    from trinity.cli.commands.bench import bench

    bench(config, source)


def _serve(config: Config, source: str) -> None:
    from trinity.cli.supervise.serve import serve

    serve(config, source)


_RUNNERS = {"both": _supervise, "train": _supervise, "explore": _join, "bench": _bench, "serve": _serve}


def check_command(asked: Request, *, as_json: bool, deep: bool) -> int:
    def action() -> int:
        config = asked.load()
        if as_json:
            _say_notices(config, sys.stderr)
            print(json.dumps(json.loads(config.model_dump_json()), indent=1))
            return 0
        from trinity.cli.plan_text import describe

        stages = expand(config)
        if config.mode in ("bench", "serve"):  # about what the last stage made
            stages = [stages[-1].model_copy(update={"mode": config.mode})]
        for stage in stages:
            print(describe(make_plan(stage)))
        _say_notices(config, sys.stdout)
        if deep:
            from trinity.cli.supervise.preflight import check_stages, machine_problems
            from trinity.data.task_pipeline import describe as describe_tasks

            for name, (steps, tasks) in check_stages(config, str(asked.config)).items():
                for line in describe_tasks(tasks, with_paths=False):
                    print(f"{name}: {line}")
                print(f"{name}: model and data are there; {steps} optimizer steps")
            unfit = [f"{stage.name}: not on this machine: {problem}"
                     for stage in stages for problem in machine_problems(make_plan(stage))]  # fmt: skip
            print(*unfit, sep="\n", end="\n" if unfit else "")
            return 2 if unfit else 0  # as `run` would end
        return 0

    return ending_well(action)


def _folder(config: Path | None, job: Path | None) -> Path:
    """The job folder: --job, the YAML's, or the newest one below the current folder."""
    from trinity.cli.commands.status import find_job

    return find_job(load(config, plugins_loaded=False) if config else None, job)


def status_command(config: Path | None, job: Path | None, as_json: bool) -> int:
    def action() -> int:
        from trinity.cli.commands.status import collect, finished, render, render_finished
        from trinity.cli.supervise.job import read_records

        folder = _folder(config, job)
        if not read_records(folder):
            summary = finished(folder)
            print(json.dumps(summary, indent=1) if as_json else render_finished(folder, summary))
            return 0
        found = asyncio.run(collect(folder))
        print(json.dumps(found, indent=1) if as_json else render(found))
        return 0

    return ending_well(action)


def log_command(config: Path | None, job: Path | None, service: str, lines: int, follow: bool, level: str) -> int:
    def action() -> int:
        from trinity.cli.commands.log import show

        show(_folder(config, job), service, lines, follow, level)
        return 0

    return ending_well(action)


def view_command(
    config: Path | None, job: Path | None, step: int | None, index: int | None, task: str, as_json: bool
) -> int:
    def action() -> int:
        from trinity.cli.commands.view import view

        print(view(_folder(config, job), step, index, task, as_json))
        return 0

    return ending_well(action)
