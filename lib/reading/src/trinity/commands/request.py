"""The options that name a YAML, and the configuration that they describe."""

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from trinity import plugins
from trinity.config import Config, ConfigError, Problem, expand, parse
from trinity.config.checks.vision import archives
from trinity.config.document import read_text
from trinity.config.names import REWARD_FUNCTIONS, WORKFLOWS
from trinity.config.operators import EXPERIENCE_OPERATORS
from trinity.data.data_files import is_data, kind_of
from trinity.plugins import satellites
from trinity.plugins.declarations import ALGORITHMS
from trinity.plugins.environments import built_in_environments, installed_environments
from trinity.reading.errors import RunError
from trinity.reading.job import make_folder
from trinity.reading.render import visible

# Sockets, logs and weights below the job folder need the rest of the system's 4,096.
_LONGEST_PATH = 3_000

OwnYaml = Callable[[list[str]], tuple[Path, str]]  # from overrides: file and text of a YAML that options describe


@dataclass(frozen=True)
class Request:
    """The options of `run` and `check`. `text`: of a YAML that `config` names and that is not there."""

    config: Path
    overrides: list[str]
    plugin_dirs: list[Path]
    text: str = ""

    def load(self) -> Config:
        """Loads the configuration. Plugins are imported first, since the YAML may name what they register."""
        try:
            for notice in plugins.load(self.plugin_dirs):
                print(f"note: {visible(notice)}", file=sys.stderr)
            installed_environments()  # broken ones are said before the environment service meets them
        except plugins.PluginError as error:
            raise RunError(str(error), code=2) from None
        environments = {*built_in_environments(), *installed_environments()} if plugins.ENVIRONMENTS else ()
        kinds: list[tuple[str, dict[str, Any], Collection[str]]] = [
            ("workflow", plugins.WORKFLOWS, WORKFLOWS),
            ("reward function", plugins.REWARD_FUNCTIONS, REWARD_FUNCTIONS),
            ("experience operator", plugins.EXPERIENCE_OPERATORS, EXPERIENCE_OPERATORS),
            ("environment", plugins.ENVIRONMENTS, environments),
        ]
        for kind, own, builtin in kinds:
            for name in sorted(own.keys() & {*builtin}):
                file = sys.modules[own[name].__module__].__file__
                raise RunError(f"{file}: {name!r} is the name of a built-in {kind}; choose another", code=2)
        text = self.text or read_text(self.config)
        config = parse(text, str(self.config), self.overrides, checks=[_check_satellites])
        _check_folder(config, str(self.config))
        return config


def request(
    config: Path | None, arguments: list[str] | None, plugin_dirs: list[Path] | None, own: OwnYaml | None = None
) -> Request:
    """Reads the options. The YAML is --config, or the first argument that is no override, or the one of `own`."""
    overrides, text = list(arguments or []), ""
    if config is None and overrides and ("=" not in overrides[0] or Path(overrides[0]).is_file()):
        config = Path(overrides.pop(0))
    if own is not None:
        if config is not None:
            what = "and --model, --data: a YAML names both; leave the options or the YAML out"
            raise RunError(f"{config} {what}, or give model.model_path=...", 2)
        config, text = own(overrides)
    elif config is not None and kind_of(config) != ".json" and is_data(config):
        what = "is data, which a YAML names"
        raise RunError(f"{config}: {what}; without one: trinity run --model MODEL --data {shlex.quote(str(config))}", 2)
    if config is None:
        raise RunError("no YAML; give it as --config FILE, or give `trinity run` --model and --data", code=2)
    return Request(config, overrides, plugin_folders(plugin_dirs), text)


def own_yaml(model: str, data: str, subset: str, prompt: str, answer: str, algorithm: str) -> OwnYaml | None:
    """Returns the maker of the YAML of --model and --data; None without options. Raises RunError if one is missing."""
    if not any((model, data, subset, prompt, answer, algorithm)):
        return None
    if (found := satellites.find("own_data")) is None:
        raise RunError(f"a run without a YAML needs {satellites.missing('own_data')}; give --config FILE", 2)
    made: OwnYaml = found.own_yaml(model, data, subset, prompt, answer, algorithm)
    return made


def plugin_folders(given: list[Path] | None) -> list[Path]:
    """Returns the folders of --plugin-dir and those of TRINITY_PLUGIN_DIRS."""
    listed = os.environ.get("TRINITY_PLUGIN_DIRS", "").replace(",", os.pathsep).split(os.pathsep)
    return [*(given or []), *(Path(folder) for folder in listed if folder)]


def say_notices(config: Config, file: TextIO) -> None:
    for notice in config.notices:
        print(f"note: {visible(str(notice))}", file=file)


def _check_folder(config: Config, source: str) -> None:
    """Raises ConfigError if the folder of the job, a store or a task pipeline is absent and cannot be made."""
    places = [("checkpoint_root_dir", "the job folder", make_folder(config)), *_outputs(config)]
    if config.stages and not _why_not(make_folder(config)):
        places += [("checkpoint_root_dir", "the folder of a stage", make_folder(stage)) for stage in expand(config)]
    stores = config.synchronizer.storage if config.mode in ("both", "train") else []
    for index, entry in enumerate(stores):
        if entry.startswith("/"):
            places.append((f"synchronizer.storage.{index}", "the folder", Path(entry)))
    problems = []
    for key, what, folder in places:
        if problem := _why_not(folder):
            problems.append(
                Problem(key, f"{what} {str(folder)[:200]!r} cannot be made: {problem}; give another folder")
            )
    if problems:
        raise ConfigError(source, problems)


def _check_satellites(stage: Config) -> Iterator[Problem]:
    """Checks the keys that satellites add: they are missing, or check a key themselves."""
    if stage.mode not in ("both", "train") and not satellites.find("modes"):
        yield Problem("mode", f"is {stage.mode!r}, which is in {satellites.missing('modes')}")
    if stage.explorer.traffic is not None and not satellites.find("traffic"):
        yield Problem("explorer.traffic", f"needs {satellites.missing('traffic')}")
    declared = ALGORITHMS.get(stage.algorithm.algorithm_type)
    reads_rows = declared is not None and declared.offline  # of a dataset; the check of rows refuses experience
    given = [where for where in archives(stage) if not (reads_rows and where.startswith("buffer."))]
    if given and not satellites.find("archive"):  # it imports numpy
        needed = f"names an archive, which needs {satellites.missing('archive')}; install it, or leave the key out"
        yield from (Problem(where, needed) for where in given)
    if stage.data_processor.task_pipeline is None:
        return
    if pipeline := satellites.find("task_pipeline"):
        yield from pipeline.check_task_pipeline(stage)
    else:
        what = f"needs {satellites.missing('task_pipeline')}; install it, or leave the section out"
        yield Problem("data_processor.task_pipeline", what)


def _outputs(config: Config) -> Iterator[tuple[str, str, Path]]:
    """Yields the folders that task pipelines would write and that do not exist."""
    for stage in expand(config) if config.mode in ("both", "train") else []:
        pipeline = stage.data_processor.task_pipeline
        output = Path(pipeline.output).expanduser().absolute() if pipeline and pipeline.output else None
        if output is not None and not os.path.exists(output):
            folder = output.parent if output.suffix else output
            yield "data_processor.task_pipeline.output", "the folder", folder


def _why_not(folder: Path) -> str:
    """Says why a folder is absent and cannot be made; empty if it exists or can be made."""
    place = folder
    try:
        while not os.path.lexists(place) and place != place.parent:
            place = place.parent
        if not place.is_dir():
            return f"{place} is {'a link to nowhere' if not place.exists() else 'a file, no folder'}"
        if len(os.fsencode(folder)) > _LONGEST_PATH:
            return f"its path has more than {_LONGEST_PATH} bytes"
        # For root, permissions say nothing of /proc, of read-only mounts and of full disks.
        os.rmdir(tempfile.mkdtemp(prefix=".trinity-check-", dir=place))
    except PermissionError:
        return f"there is no permission to write in {place}"
    except (OSError, ValueError) as error:
        return f"in {place}: {getattr(error, 'strerror', None) or error}"
    return ""
