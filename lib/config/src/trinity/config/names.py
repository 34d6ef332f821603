"""Names that a YAML may use: the built-in ones, and those of plugins. The services implement them; tests compare."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from trinity import plugins
from trinity.config.errors import OF_PLUGINS, Problem
from trinity.config.schema.explorer import AuxiliaryModelConfig
from trinity.config.schema.pipeline import OperatorConfig
from trinity.config.workflows import OF_TRINITY_RFT, WORKFLOWS
from trinity.plugins import satellites

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

# priority function -> its arguments and their defaults
PRIORITY_ARGS: dict[str, dict[str, Any]] = {
    "linear_decay": {"decay": 2.0},
    "linear_decay_use_count_control_randomization": {"decay": 2.0, "use_count_limit": 3, "sigma": 0.0},
}

# experience operator -> its arguments and their defaults; null: a number, unless there is a better choice at run time
EXPERIENCE_OPERATORS: dict[str, dict[str, Any]] = {
    "reward_filter": {"threshold": 0.0},
    "reward_std_filter": {"threshold": 0.0},
    "invalid_reward_filter": {"required_metrics": []},
    "pass_rate_calculator": {"threshold": None},
    "reward_shaping_mapper": {"reward_shaping_configs": []},
    "dapo_dynamic_sampling_filter": {"metric_key": "accuracy", "correct_threshold": 0.0},
    "mask_response_truncated": {},
    "overlong_reward_shaping": {"max_response_length": None, "cache_length": None, "penalty_factor": 1.0},
    "multi_step_padding": {"max_steps": 0},
    "raft_filter": {"k": 1, "threshold": 0.0},
    "opmd_filter": {"min_prompt_length": 3},
    "data_juicer": {"operators": [], "config_path": ""},
}
_OTHER_NAMES = {
    "dapo_dynamic_sampling": "dapo_dynamic_sampling_filter",
    "DAPODynamicSamplingFilter": "dapo_dynamic_sampling_filter",
    "MaskResponseTruncatedOperator": "mask_response_truncated",
    "RAFT_filter": "raft_filter",
    "OPMD_filter": "opmd_filter",
}
EXPERIENCE_OPERATORS |= {other: EXPERIENCE_OPERATORS[name] for other, name in _OTHER_NAMES.items()}
SHAPING_OPERATIONS = ("ADD", "SUB", "MUL", "DIV")
# the lowest values of arguments of operators, and the entries of their lists
_LOWEST = {"k": 1, "max_steps": 0, "max_response_length": 1, "cache_length": 1, "penalty_factor": 0}
_ENTRIES = {
    "required_metrics": "names of metrics",
    "operators": "Data-Juicer's operators, each one name with its arguments: - text_length_filter: {min_len: 5}",
    "reward_shaping_configs": f"{{stats_key: a metric's name, op_type: {' or '.join(SHAPING_OPERATIONS)}, weight: "
    "a number}, without a weight of 0 for DIV",
}

MONITOR_ARGS: dict[str, tuple[str, ...]] = {
    "tensorboard": (),
    "wandb": ("base_url", "api_key", "entity", "tags", "notes"),
    "mlflow": ("uri", "username", "password"),
    "swanlab": ("workspace", "mode", "logdir"),
    "trackio": ("space_id", "server_url", "private"),
    "none": (),
}

_LARGEST = 1e12  # of a number in a free-form mapping
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


def experience_operators() -> dict[str, dict[str, Any] | None]:
    """Operators and their arguments; None: one of a plugin, with any arguments."""
    return {**EXPERIENCE_OPERATORS, **dict.fromkeys(plugins.EXPERIENCE_OPERATORS.keys() - EXPERIENCE_OPERATORS.keys())}


def experience_operator_problems(operators: Sequence[OperatorConfig]) -> Iterator[Problem]:
    """Problems of data_processor.experience_pipeline.operators."""
    known = experience_operators()
    for index, operator in enumerate(operators):
        place = f"data_processor.experience_pipeline.operators.{index}"
        if operator.name not in known:
            names = f"{', '.join(sorted(known))} {OF_PLUGINS}"
            yield Problem(f"{place}.name", f"is {operator.name!r}, which is not registered; known: {names}")
            continue
        defaults = known[operator.name]
        if defaults is None:
            continue
        problems = {
            name: _argument_problem(operator.name, defaults, name, operator.args[name]) for name in operator.args
        }
        yield from (Problem(f"{place}.args.{name}", problem) for name, problem in problems.items() if problem)
        if operator.name == "data_juicer" and not any(operator.args.values()):
            yield Problem(f"{place}.args.operators", "is missing; give Data-Juicer's operators here, or config_path")
        limit, cache = (operator.args.get(name) for name in ("max_response_length", "cache_length"))
        if limit and cache and not any(problems.values()) and cache > limit:
            yield Problem(f"{place}.args.cache_length", f"is {cache}, more than max_response_length = {limit}")


def _argument_problem(operator: str, defaults: dict[str, Any], name: str, value: Any) -> str:
    """Empty if there is none."""
    if name not in defaults:
        return f"is {value!r}, but {operator} has no such argument; known: {', '.join(defaults) or 'none'}"
    default = defaults[name]
    if isinstance(default, str):
        return "" if isinstance(value, str) else f"is {value!r}, must be text"
    if isinstance(default, list):
        entries = value if isinstance(value, list) else []
        wrong = [entry for entry in entries if not _fits(name, entry)]
        return "" if isinstance(value, list) and not wrong else f"is {value!r}, must be a list of {_ENTRIES[name]}"
    whole, lowest = isinstance(default, int) or name.endswith("_length"), _LOWEST.get(name, -math.inf)
    if (value is None and default is None) or (is_number(value, whole) and value >= lowest):
        return ""
    kind = ("a whole number" if whole else "a number") + (f" >= {lowest}" if name in _LOWEST else "")
    return f"is {value!r}, must be {kind}{' or null' if default is None else ''}"


def _fits(name: str, entry: Any) -> bool:
    """Tells if an entry of a list has the form in _ENTRIES."""
    if name == "required_metrics":
        return isinstance(entry, str)
    if not isinstance(entry, dict):
        return False
    if name == "operators":
        return len(entry) == 1 and all(args is None or isinstance(args, dict) for args in entry.values())
    weight, operation = entry.get("weight", 1.0), entry.get("op_type", "ADD")
    return (
        entry.keys() <= {"stats_key", "op_type", "weight"}
        and isinstance(entry.get("stats_key"), str)
        and operation in SHAPING_OPERATIONS
        and is_number(weight)
        and not (operation == "DIV" and weight == 0)
    )


def is_number(value: Any, whole: bool = False, lowest: float = -math.inf) -> bool:
    """Tells if a value of a free-form mapping is a finite number (or a whole one) of at least `lowest`."""
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    return number and -_LARGEST <= value <= _LARGEST and value >= lowest


def rates(architectures: Iterable[object]) -> bool:
    """Tells if a model whose config.json names these architectures gives a number instead of text."""
    return any("SequenceClassification" in str(name) or "Reward" in str(name) for name in architectures)


def auxiliary_name(model: AuxiliaryModelConfig) -> str:
    """Name by which workflows reach an auxiliary model."""
    return model.name or model.model_path.rstrip("/").rpartition("/")[2]
