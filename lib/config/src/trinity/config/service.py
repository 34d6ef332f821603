"""How a service process gets its part of a run: a YAML file, and the stage if it has several."""

from pathlib import Path

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
