"""The options that name a YAML, and the configuration that they describe."""

import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from trinity import plugins
from trinity.config import Config, load
from trinity.config.names import EXPERIENCE_OPERATORS, REWARD_FUNCTIONS, WORKFLOWS
from trinity.data.task_pipeline import check_task_pipeline
from trinity.plugins.environments import built_in_environments, installed_environments
from trinity.reading.errors import RunError
from trinity.reading.job import check_folder
from trinity.reading.render import visible


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
        config = load(self.config, self.overrides, checks=[check_task_pipeline])
        check_folder(config, str(self.config))
        return config


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
