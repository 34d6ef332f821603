"""Gives a service process its part of a run: a YAML file, and the stage if it has several."""

import json
import logging
import os
from pathlib import Path
from typing import Any

from trinity import plugins
from trinity.config.checks.sections import check_algorithm
from trinity.config.errors import ConfigError, Problem
from trinity.config.load import load
from trinity.config.plan import Plan, expand, make_plan

log = logging.getLogger(__name__)


def load_plan(path: Path | None, stage: str = "", plugin_dirs: str = "", *, needs_algorithm: bool = False) -> Plan:
    """The plan of one stage. Raises ConfigError or PluginError.

    plugin_dirs: folders to import first, separated as PATH is. needs_algorithm: every name in the section has to be
    registered then.
    """
    for notice in plugins.load([folder for folder in plugin_dirs.split(os.pathsep) if folder]):
        log.warning(notice)
    if path is None:
        raise ConfigError("config_file", [Problem("", "is not set; give the run's YAML file")])
    config = load(path, plugins_loaded=False)
    stages = expand(config)
    named = {one.stage_name: expanded for one, expanded in zip(config.stages, stages, strict=False)}
    if not stage and len(stages) == 1:
        named = {stage: stages[0]}
    if stage not in named:
        raise ConfigError(str(path), [Problem("stages", f"the stage is {stage!r}; give one of {', '.join(named)}")])
    if needs_algorithm and (problems := list(check_algorithm(named[stage]))):
        raise ConfigError(str(path), problems)
    return make_plan(named[stage])


def monitor_fields(plan: Plan, role: str) -> dict[str, Any]:
    """Returns the fields of trinity.runtime.monitor.MonitorOptions for the run `<name>_<role>`."""
    config = plan.config
    return {
        "kind": config.monitor.monitor_type,
        "args": config.monitor.monitor_args or {},
        "project": config.project,
        "group": config.group,
        "name": f"{config.name}_{role}",
        "role": role,
        "folder": plan.job_dir / "monitor",
        "config": json.loads(config.model_dump_json()),
        "most_bytes": config.monitor.metrics_bytes,
    }
