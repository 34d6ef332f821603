"""Names that a YAML may use: the built-in ones, and those of plugins. The services implement them; tests compare."""

from collections.abc import Iterable

from trinity import plugins
from trinity.config.schema.explorer import AuxiliaryModelConfig
from trinity.config.workflows import OF_TRINITY_RFT, WORKFLOWS
from trinity.plugins import satellites
from trinity.plugins.arguments import Argument

REWARD_FUNCTIONS = (
    "accuracy_reward",
    "format_reward",
    "math_reward",
    "math_boxed_reward",
    "math_dapo_reward",
    "countdown_reward",
    "code_tests",
)

# data_source of veRL's rows -> the reward function that reads what veRL's default scorer of it reads
DATA_SOURCES = {
    **dict.fromkeys(
        ("openai/gsm8k", "numina_aops_forum", "numina_synthetic_math", "numina_amc_aime"), "accuracy_reward"
    ),
    **dict.fromkeys(("numina_synthetic_amc", "numina_cn_k12", "numina_olympiads"), "accuracy_reward"),
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval"), "math_boxed_reward"),
    **dict.fromkeys(("HuggingFaceH4/MATH-500", "hiyouga/geometry3k"), "math_boxed_reward"),
    **dict.fromkeys(("math", "math_dapo", "math_dapo_reasoning"), "math_dapo_reward"),
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code_tests"),
}
_AIME = "aime"  # veRL: every data_source that begins with it

_DECAY = {"decay": Argument(2.0, "number", low=0)}
PRIORITY_ARGS: dict[str, dict[str, Argument]] = {
    "linear_decay": _DECAY,
    "linear_decay_use_count_control_randomization": {
        **_DECAY,
        "use_count_limit": Argument(3, "number", low=0),
        "sigma": Argument(0.0, "number", low=0),
    },
}

MONITOR_ARGS: dict[str, tuple[str, ...]] = {
    "tensorboard": (),
    "wandb": ("base_url", "api_key", "entity", "tags", "notes"),
    "mlflow": ("uri", "username", "password"),
    "swanlab": ("workspace", "mode", "logdir"),
    "trackio": ("space_id", "server_url", "private"),
    "none": (),
}

ARCHIVES = "a .jsonl, .db or .sqlite file, a folder .parquet, or an sqlite:/// or postgresql:// URL"


def is_archive(path: str) -> bool:
    """Tells if a path names an archive of experience; trinity-archive opens it."""
    scheme = path.partition("://")[0] if "://" in path else ""
    kinds = (".jsonl", ".db", ".sqlite", ".parquet", "/")
    return scheme.partition("+")[0] in ("sqlite", "postgresql", "postgres") or (not scheme and path.endswith(kinds))


def workflows() -> tuple[str, ...]:
    found = (*WORKFLOWS, *plugins.WORKFLOWS)
    return found if satellites.find("foreign_keys") else tuple(name for name in found if name not in OF_TRINITY_RFT)


def reward_functions() -> tuple[str, ...]:
    return (*REWARD_FUNCTIONS, *plugins.REWARD_FUNCTIONS)


def reward_named(name: str) -> str:
    """The reward function of a row that names it, or that names a data source of veRL; another name is returned."""
    if name in reward_functions():
        return name
    return "math_dapo_reward" if name.startswith(_AIME) else DATA_SOURCES.get(name, name)


def rates(architectures: Iterable[object]) -> bool:
    """Tells if a model whose config.json names these architectures gives a number instead of text."""
    return any("SequenceClassification" in str(name) or "Reward" in str(name) for name in architectures)


def auxiliary_name(model: AuxiliaryModelConfig) -> str:
    """Name by which workflows reach an auxiliary model."""
    return model.name or model.model_path.rstrip("/").rpartition("/")[2]
