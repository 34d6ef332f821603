"""What must be true on this machine before anything starts: the model is there, the data can be read."""

from pathlib import Path

from trinity.config import ConfigError, Plan, Problem
from trinity.config.datasets import DatasetError, read


def check_inputs(plan: Plan, source: str) -> int:
    """Look at model and data of a stage; returns its last optimizer step. Raises ConfigError with all problems."""
    problems: list[Problem] = []
    problems += _check_model(plan.config.model.model_path)
    rows = 0
    for key, path, split, subset, column in _datasets(plan):
        try:
            found = read(path, split, subset)
        except DatasetError as error:
            problems.append(error.at(key))
            continue
        if column and column not in found[0]:
            known = ", ".join(found[0])
            problems.append(Problem(f"{key}.format", f"the rows have no column {column!r}; they have {known}"))
        rows = rows or len(found)
    if not problems and plan.steps_for(rows) < 1:
        need = plan.groups_per_step
        problems.append(Problem("buffer.batch_size", f"one step needs {need} rows, all epochs together have {rows}"))
    if problems:
        raise ConfigError(source, problems)
    return plan.steps_for(rows)


def _check_model(path: str) -> list[Problem]:
    place = Path(path).expanduser()
    if place.is_dir():
        if not (place / "config.json").is_file():
            return [Problem("model.model_path", f"{path!r} has no config.json; it is no Hugging Face model folder")]
        return []
    looks_local = place.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1
    if looks_local or place.exists():
        return [Problem("model.model_path", f"{path!r} does not exist; give a model folder or a hub name (owner/name)")]
    return []


def _datasets(plan: Plan) -> list[tuple[str, str, str, str | None, str]]:
    """(key, path, split, subset, column that must be there), the one that counts steps first."""
    if plan.algorithm.offline:
        source = plan.config.buffer.trainer_input.experience_buffer
        assert source is not None and source.path is not None
        key = "buffer.trainer_input.experience_buffer"
        return [(key, source.path, source.split, source.subset_name, "")]
    found = []
    base = "buffer.explorer_input"
    if plan.taskset is not None:
        t = plan.taskset
        found.append((f"{base}.taskset", t.path, t.split, t.subset_name, t.format.prompt_key))
    for index, t in enumerate(plan.eval_tasksets):
        found.append((f"{base}.eval_tasksets.{index}", t.path, t.split, t.subset_name, t.format.prompt_key))
    return found
