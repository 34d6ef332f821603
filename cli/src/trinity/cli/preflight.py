"""What must be true on this machine before anything starts: the model is there, the data can be read."""

import importlib.util
import json
from pathlib import Path

from trinity.config import Config, ConfigError, Plan, Problem, expand, make_plan
from trinity.config.datasets import DatasetError, Row, read, sft_format


def check_stages(config: Config, source: str) -> dict[str, int]:
    """Model and data of every stage; returns each one's optimizer steps. Raises ConfigError.

    The model of a later stage is made by the one before it, so only its data can be looked at.
    """
    stages = expand(config)
    return {s.name: check_inputs(make_plan(s.model_copy(update={"model": config.model})), source) for s in stages}


def check_inputs(plan: Plan, source: str) -> int:
    """Look at model and data of a stage; returns its last optimizer step. Raises ConfigError with all problems."""
    problems = [*_check_model(plan), *_check_monitor(plan)]
    rows = 0
    for key, path, split, subset, columns, counts in _datasets(plan):
        try:
            found = read(path, split, subset)
        except DatasetError as error:
            problems.append(error.at(key))
            continue
        if plan.algorithm.offline:
            problems += _check_sft(plan, key, found[0])
        for field, column in columns.items():
            if column not in found[0]:
                known = ", ".join(found[0])
                problems.append(Problem(f"{key}.{field}", f"the rows have no column {column!r}; they have {known}"))
        rows += len(found) if counts else 0
    if not problems and plan.config.mode in ("both", "train") and plan.steps_for(rows) < 1:
        need = plan.groups_per_step
        problems.append(Problem("buffer.batch_size", f"one step needs {need} rows, all epochs together have {rows}"))
    if problems:
        raise ConfigError(source, problems)
    return plan.steps_for(rows)


def _check_sft(plan: Plan, key: str, row: Row) -> list[Problem]:
    source = plan.config.buffer.trainer_input.experience_buffer
    assert source is not None
    try:
        sft_format(source.format, row)
    except DatasetError as error:
        return [error.at(f"{key}.format")]
    return []


def _check_monitor(plan: Plan) -> list[Problem]:
    kind = plan.config.monitor.monitor_type
    if kind in ("none", "tensorboard") or importlib.util.find_spec(kind) is not None:
        return []
    return [Problem("monitor.monitor_type", f"{kind!r} is not installed; `pip install {kind}`, or use tensorboard")]


def _check_model(plan: Plan) -> list[Problem]:
    models = [("model.model_path", plan.config.model.model_path)]
    for index, model in enumerate(plan.config.explorer.auxiliary_models if not plan.algorithm.offline else []):
        models.append((f"explorer.auxiliary_models.{index}.model_path", model.model_path))
    problems = [problem for key, path in models for problem in _check_folder(key, path)]
    if problems or plan.config.mode == "explore":
        return problems
    longest = _longest(Path(plan.config.model.model_path).expanduser())
    if longest and plan.lengths.model > longest:
        what = f"is {plan.lengths.model}, but the model was made for at most {longest} tokens (max_position_embeddings)"
        return [Problem("model.max_model_len", what)]
    return []


def _longest(folder: Path) -> int:
    """max_position_embeddings of a local model without rope scaling; 0 where it says nothing."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return 0
    return 0 if config.get("rope_scaling") else int(config.get("max_position_embeddings") or 0)


def _check_folder(key: str, path: str) -> list[Problem]:
    place = Path(path).expanduser()
    if place.is_dir():
        if not (place / "config.json").is_file():
            return [Problem(key, f"{path!r} has no config.json; it is no Hugging Face model folder")]
        return []
    looks_local = place.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1
    if looks_local or place.exists():
        return [Problem(key, f"{path!r} does not exist; give a model folder or a hub name (owner/name)")]
    return []


_Dataset = tuple[str, str, str, str | None, dict[str, str], bool]


def _datasets(plan: Plan) -> list[_Dataset]:
    """(key, path, split, subset, columns that must be there by their key, whether its rows make steps)."""
    if plan.algorithm.offline:
        source = plan.config.buffer.trainer_input.experience_buffer
        assert source is not None and source.path is not None
        key = "buffer.trainer_input.experience_buffer"
        return [(key, source.path, source.split, source.subset_name, {}, True)]
    if plan.config.mode == "serve":
        return []
    found: list[_Dataset] = []
    base, inputs = "buffer.explorer_input", plan.config.buffer.explorer_input
    for index, t in enumerate(plan.tasksets if plan.config.mode in ("both", "train") else []):
        key = f"{base}.taskset" if inputs.taskset else f"{base}.tasksets.{index}"
        columns = {"format.prompt_key": t.format.prompt_key}
        columns |= {f"data_selector.feature_keys.{i}": name for i, name in enumerate(t.data_selector.feature_keys)}
        found.append((key, t.path, t.split, t.subset_name, columns, True))
    for index, t in enumerate(plan.eval_tasksets):
        columns = {"format.prompt_key": t.format.prompt_key}
        found.append((f"{base}.eval_tasksets.{index}", t.path, t.split, t.subset_name, columns, False))
    return found
