"""`trinity debug`: one task's workflow on one engine, from prompt to experience.

Nothing is trained and no run is joined: the engine has the weights of model.model_path. With --watch the engine stays
up, and the task runs again whenever a plugin file changes.
"""

import os
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from trinity.cli.supervise.checks.preflight import check_inputs
from trinity.cli.supervise.checks.task_rows import check_tasks
from trinity.cli.supervise.phases import phase
from trinity.commands import Arguments, AsJson, ConfigOption, PluginDirs, command, group
from trinity.commands.request import Request, request, say_notices
from trinity.compat_rft.debug.text import render
from trinity.compat_rft.debug.workbench import Workbench
from trinity.config import Config, ConfigError, Plan, expand, make_plan
from trinity.data.datasets import DatasetError, Row, read_taskset
from trinity.data.experience import Task, TaskKind
from trinity.data.selectors import make_selector
from trinity.data.task_source import TaskSource
from trinity.reading.errors import RunError
from trinity.reading.render import to_json
from trinity.runtime import logs

app = group()

_POLL_SECONDS = 0.3
# Options of Trinity-RFT's `debug` whose work other commands do here.
_ELSEWHERE = {
    "inference_model": "the engine is a part of `trinity debug`; with --watch it stays up between runs",
    "viewer": "`trinity ui` and `trinity view` show the experiences of a run",
}
_REFUSED = {
    "--enable-profiling": "Trinity has no profiler of workflows; run `py-spy` on `trinity debug --watch`",
    "--port": "is of Trinity-RFT's viewer; `trinity ui` has the pages of a run",
    "--output-file": "is gone in Trinity-RFT too; --output-dir names the folder of debug.json",
}


@command(app, "debug")
def debug(
    arguments: Arguments = None,
    config: ConfigOption = None,
    task: Annotated[int, typer.Option("--task", min=0, help="Row of the first taskset, from 0")] = 0,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text of the prompt, in place of a row's")] = None,
    truth: Annotated[str, typer.Option("--truth", help="Reference answer to --prompt")] = "",
    watch: Annotated[
        Path | None, typer.Option("--watch", help="A plugin file: run again whenever a file of its folder changes")
    ] = None,
    as_json: AsJson = False,
    plugin_dir: PluginDirs = None,
    output_dir: Annotated[Path | None, typer.Option("--output-dir", help="Write debug.json into this folder")] = None,
    disable_overwrite: Annotated[
        bool, typer.Option("--disable-overwrite", help="Refuse an --output-dir that has a debug.json")
    ] = False,
    module: Annotated[str, typer.Option("--module", help="As in Trinity-RFT; only `workflow`")] = "workflow",
    enable_profiling: Annotated[bool, typer.Option("--enable-profiling", hidden=True)] = False,
    port: Annotated[int | None, typer.Option("--port", hidden=True)] = None,
    output_file: Annotated[Path | None, typer.Option("--output-file", hidden=True)] = None,
) -> int:
    """Run one task's workflow on one engine, and show its outcome."""
    if module != "workflow":
        raise RunError(f"--module {module}: {_ELSEWHERE.get(module, 'is unknown; the one there is is workflow')}", 2)
    refused = {"--enable-profiling": enable_profiling, "--port": port, "--output-file": output_file}
    if given_one := next((name for name, value in refused.items() if value), None):
        raise RunError(f"{given_one}: {_REFUSED[given_one]}", 2)
    file = output_dir / "debug.json" if output_dir is not None else None
    if file is not None and disable_overwrite and file.exists():
        raise RunError(f"--output-dir: {file} is there already; name another folder, or allow it to be written", 2)
    folders = [*(plugin_dir or []), *([_folder_of(watch)] if watch is not None else [])]
    options = request(config, arguments, folders)
    logs.configure("debug", level="ERROR")
    loaded = _load(options, waits=watch is not None)
    say_notices(loaded, sys.stderr)
    os.environ["TRINITY_PLUGIN_DIRS"] = os.pathsep.join(str(path.absolute()) for path in options.plugin_dirs)
    stage = next((one for one in expand(loaded) if not make_plan(one).offline), None)
    if stage is None:
        raise RunError(f"{options.config}: no stage explores, so no workflow runs", 2)
    plan = make_plan(stage)
    given = task_of(plan, str(options.config), task, prompt, truth)
    check_inputs(make_plan(stage.model_copy(update={"mode": "serve"})), str(options.config), listens=False)
    if output_dir is not None:  # said now, not after the engine has run
        output_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output_dir).close()
    signal.signal(signal.SIGTERM, _end)
    bench = Workbench(stage)
    try:
        with phase("starts the environment service, loads vLLM and the model", sys.stderr):
            bench.start()
        seen = changes(options.plugin_dirs)
        show = _Show(given, as_json, file)
        with phase(f"runs task {given.task_id}", sys.stderr):
            found = bench.run(given)
        code = show(found)
        if watch is not None:
            _again_and_again(bench, given, show, options.plugin_dirs, seen)
        return code
    finally:
        bench.close()


def _end(signum: int, _: object) -> None:
    """Ends like Ctrl-C, which removes processes and their folder; a second signal does not interrupt that."""
    signal.signal(signum, signal.SIG_IGN)
    raise RunError("ended by SIGTERM", 128 + signum)


class _Show:
    """Prints an outcome and writes it below --output-dir. Returns the exit code."""

    def __init__(self, task: Task, as_json: bool, file: Path | None) -> None:
        self._task, self._as_json, self._file = task, as_json, file

    def __call__(self, found: dict[str, Any]) -> int:
        shown = {"task": self._task.task_id, "workflow": self._task.workflow, **found}
        if self._file is not None:
            self._file.write_text(to_json(shown) + "\n", encoding="utf-8")
        print(to_json(shown) if self._as_json else render(self._task, found), flush=True)
        return 0 if found["failure"] is None else 1


def task_of(plan: Plan, source: str, number: int, prompt: str | None = None, truth: str = "") -> Task:
    """Returns the task of a row of the first taskset; with `prompt`, a task with only this prompt and reference answer.

    Raises RunError for a missing row, ConfigError for an unusable one.
    """
    taskset, buffer = plan.tasksets[0], plan.config.buffer.explorer_input
    key = f"buffer.explorer_input.{'taskset' if buffer.taskset else 'tasksets.0'}"
    try:
        if prompt is not None:
            row: Row = {taskset.format.prompt_key: prompt, taskset.format.response_key: truth}
        else:
            rows = read_taskset(taskset)
            if number >= len(rows):
                raise RunError(f"--task {number}: {taskset.name!r} has the rows 0 to {len(rows) - 1}", 2)
            row = rows[number]
        if prompt is None and (problems := check_tasks(plan, key, taskset, [row])):
            raise ConfigError(source, problems)
        selector = make_selector(taskset.data_selector.model_copy(update={"selector_type": "sequential"}), [row])
    except DatasetError as error:
        raise ConfigError(source, [error.at(key)]) from None
    task = TaskSource("debug", plan, taskset, [row], TaskKind.TRAIN, selector).train_task(0, 1, 0)
    name = "prompt" if prompt is not None else str(number)
    return replace(task, task_id=f"{taskset.name}/{name}", row=0 if prompt is not None else number)


def _folder_of(watched: Path) -> Path:
    if watched.suffix != ".py" or not watched.is_file():
        raise RunError(f"--watch: {watched} is no Python file", 2)
    return watched.absolute().parent


def _load(options: Request, waits: bool) -> Config:
    """Loads the YAML and its plugins. `waits`: until plugin files that cannot be imported change."""
    while True:
        seen = changes(options.plugin_dirs)
        try:
            return options.load()
        except RunError as error:
            if not waits:
                raise
            _wait_for_change(options.plugin_dirs, seen, str(error))


def _again_and_again(
    bench: Workbench, task: Task, show: _Show, folders: list[Path], seen: dict[Path, tuple[int, int]]
) -> None:
    """Until SIGINT, runs the task whenever plugin files have changed since `seen` and can be imported."""
    problem = ""
    while True:
        _wait_for_change(folders, seen, problem)
        seen = changes(folders)
        problem = bench.reload()
        if not problem:
            show(bench.run(task))


def _wait_for_change(folders: list[Path], seen: dict[Path, tuple[int, int]], problem: str) -> None:
    if problem:
        print(f"trinity: {problem}", file=sys.stderr)
    print("waiting for a change of the plugin files; Ctrl-C ends it", file=sys.stderr, flush=True)
    while changes(folders) == seen:
        time.sleep(_POLL_SECONDS)


def changes(folders: list[Path]) -> dict[Path, tuple[int, int]]:
    """Returns time of change, in ns, and size of each Python file below the folders."""
    found = {}
    for folder in folders:
        for path in sorted(folder.expanduser().rglob("*.py")):
            try:
                about = path.stat()
            except OSError:  # an editor replaces it at this moment
                continue
            found[path] = (about.st_mtime_ns, about.st_size)
    return found
