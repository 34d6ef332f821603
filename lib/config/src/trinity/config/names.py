"""Names that a YAML may use: the built-in ones, and those of plugins. The services implement them; tests compare."""

from typing import Any

from trinity import plugins
from trinity.config.schema.explorer import AuxiliaryModelConfig

WORKFLOWS = ("simple_workflow", "math_workflow", "math_rm_workflow")
REWARD_FUNCTIONS = ("accuracy_reward", "math_reward", "math_boxed_reward", "countdown_reward")

DEFAULT_WORKFLOW = "simple_workflow"
DEFAULT_REWARD_FUNCTION = "math_reward"

# selector -> its arguments and their defaults
SELECTOR_ARGS: dict[str, dict[str, Any]] = {
    "sequential": {},
    "shuffle": {},
    "random": {},
    "offline_easy2hard": {},
    "diff_based": {"m": 16.0, "rho": 0.2, "lamb": 0.2, "target_reward": 0.5, "tau": 0.05, "do_sample": False},
}

MONITOR_ARGS: dict[str, tuple[str, ...]] = {
    "tensorboard": (),
    "wandb": ("base_url", "api_key", "entity", "tags", "notes"),
    "mlflow": ("uri", "username", "password"),
    "swanlab": ("workspace", "mode", "logdir"),
    "none": (),
}


def workflows() -> tuple[str, ...]:
    return (*WORKFLOWS, *plugins.WORKFLOWS)


def reward_functions() -> tuple[str, ...]:
    return (*REWARD_FUNCTIONS, *plugins.REWARD_FUNCTIONS)


def auxiliary_name(model: AuxiliaryModelConfig) -> str:
    """Name by which workflows reach an auxiliary model."""
    return model.name or model.model_path.rstrip("/").rpartition("/")[2]
