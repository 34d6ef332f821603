"""Trinity's YAML: load it, check it, expand its stages, derive its plan. Imports no torch."""

from trinity.config.errors import ConfigError, Problem
from trinity.config.load import dump, flat, load, parse
from trinity.config.plan import Plan, expand, make_plan
from trinity.config.schema import Config

__all__ = ["Config", "ConfigError", "Plan", "Problem", "dump", "expand", "flat", "load", "make_plan", "parse"]
