"""veRL's reward model: an auxiliary model beside tasksets that name neither a workflow nor a reward function."""

from collections.abc import Iterator
from typing import Any

_NAMES = ("default_workflow_type", "default_reward_fn_type", "default_eval_workflow_type")
_COLUMNS = ("workflow_key", "reward_fn_key")


def score_by_models(values: dict[str, Any]) -> Iterator[str]:
    """Have such tasksets scored by the model; yields the key path of each. Leaves what is no such document as it is."""
    explorer, buffer = values.get("explorer"), values.get("buffer")
    source = buffer.get("explorer_input") if isinstance(buffer, dict) else None
    models = explorer.get("auxiliary_models") if isinstance(explorer, dict) else None
    if not isinstance(source, dict) or not isinstance(models, list):
        return
    found = dict(_tasksets(source))
    may_rate = any(
        isinstance(model, dict) and model.get("kind") != "generate" and not model.get("external_model")
        for model in models
    )
    if not may_rate or _names_one(source) or any(_names_one(taskset) for taskset in found.values()):
        return
    for path, taskset in found.items():
        taskset["workflow_args"] = {"reward_model": ""}
        yield f"buffer.explorer_input.{path}"


def _tasksets(source: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(source.get("taskset"), dict):
        yield "taskset", source["taskset"]
    for key in ("tasksets", "eval_tasksets"):
        given = source.get(key)
        for index, taskset in enumerate(given if isinstance(given, list) else []):
            if isinstance(taskset, dict):
                yield f"{key}.{index}", taskset


def _names_one(section: dict[str, Any]) -> bool:
    """Whether a section says how its tasks are worked on or scored."""
    form = section.get("format")
    columns = form if isinstance(form, dict) else {}
    return bool(section.get("workflow_args")) or any(section.get(n) for n in _NAMES) or any(map(columns.get, _COLUMNS))
