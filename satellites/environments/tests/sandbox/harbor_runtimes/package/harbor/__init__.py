"""As much of Harbor as harbor_worker.py uses, for interpreters that Harbor does not support."""

import enum
import importlib
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class SandboxBuildFailedError(Exception):
    pass


@dataclass
class ExecResult:
    stdout: str | None = None
    stderr: str | None = None
    return_code: int = 0


class EnvironmentType(enum.Enum):
    E2B = "e2b"


class NetworkMode(enum.Enum):
    NO_NETWORK = "no-network"
    PUBLIC = "public"


@dataclass
class NetworkPolicy:
    network_mode: NetworkMode


class EnvironmentConfig(dict):  # type: ignore[type-arg]
    env: dict[str, str]

    @classmethod
    def model_validate(cls, given: dict[str, Any]) -> "EnvironmentConfig":
        if type(given.get("memory_mb")) is not int:
            raise ValueError("1 validation error for EnvironmentConfig: memory_mb")
        made = cls(given)
        made.env = {name: os.path.expandvars(value) for name, value in given.get("env", {}).items()}
        return made


@dataclass
class TrialPaths:
    trial_dir: Path


@dataclass
class EnvironmentCapabilities:
    disable_internet: bool = False


class BaseEnvironment:
    def __init__(self, environment_dir: Path, session_id: str, task_env_config: Any, **kwargs: Any) -> None:
        self.environment_dir, self.session_id, self.task_env_config = environment_dir, session_id, task_env_config

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None: ...


class EnvironmentFactory:
    @staticmethod
    def _class(import_path: str) -> Any:
        module, _, name = import_path.partition(":")
        return getattr(importlib.import_module(module), name)

    @classmethod
    def run_preflight(cls, type: Any, import_path: str | None = None, kwargs: Any = None) -> None:
        if import_path is None:
            raise SystemExit("E2B requires E2B_API_KEY to be set.")
        cls._class(import_path).preflight(kwargs=kwargs)

    @classmethod
    def create_environment_from_import_path(cls, import_path: str, **given: Any) -> Any:
        return cls._class(import_path)(**given)

    @classmethod
    def create_environment(cls, **given: Any) -> Any:
        raise ImportError("The 'e2b' environment requires extra dependencies.")


for _place, _names in {
    "environments.base": (BaseEnvironment, ExecResult, SandboxBuildFailedError),
    "environments.capabilities": (EnvironmentCapabilities,),
    "environments.factory": (EnvironmentFactory,),
    "models.environment_type": (EnvironmentType,),
    "models.task.config": (EnvironmentConfig, NetworkMode, NetworkPolicy),
    "models.trial.paths": (TrialPaths,),
}.items():
    _parts = ["harbor", *_place.split(".")]
    for _end in range(2, len(_parts) + 1):
        sys.modules.setdefault(".".join(_parts[:_end]), types.ModuleType(".".join(_parts[:_end])))
    for _name in _names:
        setattr(sys.modules[f"harbor.{_place}"], _name.__name__, _name)
