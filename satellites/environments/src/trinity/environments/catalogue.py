"""Which environments this machine can play, of which package and version, and what those that it cannot need."""

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

from trinity.environments import ENVIRONMENTS
from trinity.environments.sandbox.sandbox import problem
from trinity.plugins import PluginError
from trinity.plugins.environments import entries, load_entry

# Built-in ones that need a package beside this one: its module, its distribution, the extra.
_NEEDS = {
    "alfworld": ("alfworld", "alfworld", "alfworld"),
    "scienceworld": ("scienceworld", "scienceworld", "scienceworld"),
    "gymnasium": ("gymnasium", "gymnasium", "gym"),
    "reasoning_gym": ("reasoning_gym", "reasoning-gym", "reasoning-gym"),
    "verifiers": ("verifiers", "verifiers", "verifiers"),
    "openenv": ("websockets", "websockets", "openenv"),
    "mcp": ("mcp", "mcp", "mcp"),
}


@dataclass(frozen=True)
class Offer:
    """One environment. `package`, `version`: of what it is played with; empty for one that is wholly built in.
    `problem`: why it cannot be played here; empty if it can.
    """

    name: str
    source: str
    package: str
    version: str
    problem: str


def missing(name: str) -> str:
    """Which package a built-in environment lacks here, and how to install it; empty if it lacks none."""
    module, package, extra = _NEEDS.get(name, ("", "", ""))
    if module and importlib.util.find_spec(module) is None:
        return f"{package} is not installed; pip install -e '.[{extra}]'"
    return ""


def offers() -> Iterator[Offer]:
    """The built-in ones, then those of installed packages."""
    for name in ENVIRONMENTS:
        if name == "sandbox":
            yield Offer(name, "built in", "", "", problem())
            continue
        _, package, _ = _NEEDS.get(name, ("", "", ""))
        problem_here = missing(name)
        version = importlib.metadata.version(package) if package and not problem_here else ""
        yield Offer(name, "built in", package, version, problem_here)
    for entry in entries():
        package, version = (entry.dist.name, entry.dist.version) if entry.dist else ("", "")
        try:
            load_entry(entry)
            wrong = "its name is that of a built-in environment" if entry.name in ENVIRONMENTS else ""
        except PluginError as error:
            wrong = str(error)
        yield Offer(entry.name, "installed", package, version, wrong)
