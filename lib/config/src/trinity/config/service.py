"""How a service process gets its part of a run: a YAML file, and the stage if it has several."""

import json
from pathlib import Path
from typing import Any

from trinity.config.errors import ConfigError, Problem
from trinity.config.load import load
from trinity.config.plan import Plan, make_plan
from trinity.config.stages import expand


def load_plan(path: Path | None, stage: str = "") -> Plan:
    """The plan of one stage. Raises ConfigError."""
    if path is None:
        raise ConfigError("config_file", [Problem("", "is not set; give the run's YAML file")])
    config = load(path, plugins_loaded=False)
    stages = expand(config)
    if not stage and len(stages) == 1:
        return make_plan(stages[0])
    named = {one.stage_name: expanded for one, expanded in zip(config.stages, stages, strict=False)}
    if stage not in named:
        raise ConfigError(str(path), [Problem("stages", f"the stage is {stage!r}; give one of {', '.join(named)}")])
    return make_plan(named[stage])


def monitor_fields(plan: Plan, role: str) -> dict[str, Any]:
    """What a monitor must know of the run `<name>_<role>`: the fields of trinity.runtime.monitor.MonitorOptions."""
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
    }
