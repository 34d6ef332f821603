"""Turns a YAML file into a checked Config. Reports all problems together, with line, key and the nearest name."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from trinity.config.advice import advice
from trinity.config.checks.sections import Check, check
from trinity.config.document import Lines, line_of, read_document, read_text
from trinity.config.errors import ConfigError, Problem
from trinity.config.hints import sentences
from trinity.config.schema import Config
from trinity.plugins import satellites

_NAMES = ("default_workflow_type", "default_reward_fn_type", "default_eval_workflow_type")
_COLUMNS = ("workflow_key", "reward_fn_key")


def load(
    path: str | Path, overrides: Sequence[str] = (), *, plugins_loaded: bool = True, checks: Iterable[Check] = ()
) -> Config:
    """The configuration in a YAML file, with `key.path=value` overrides on top.

    Without the plugins, names of workflows and reward functions are taken as they are. `checks` are those of other
    libraries. Raises ConfigError with every problem found.
    """
    return parse(read_text(path), str(path), overrides, plugins_loaded=plugins_loaded, checks=checks)


def parse(
    text: str,
    source: str = "<config>",
    overrides: Sequence[str] = (),
    *,
    plugins_loaded: bool = True,
    checks: Iterable[Check] = (),
) -> Config:
    """Does the same as `load` for the text of a file."""
    document, lines = read_document(text, source, overrides)
    values, notices, refused = document, list[str](), list[Problem]()
    if foreign_keys := satellites.find("foreign_keys"):
        translated = foreign_keys.translate(document)
        values, notices = translated.values, [str(notice) for notice in translated.notices]
        refused = [Problem(notice.path, notice.message, line_of(notice.path, lines)) for notice in translated.refused]
    message = "names no workflow and no reward function; the reward model in explorer.auxiliary_models scores it"
    notices += [f"{path}: {message}" for path in _score_by_models(values)]
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(source, sorted([*refused, *problems_of(error, lines)], key=lambda p: p.line)) from None
    config.note([*notices, *advice(config)])
    found = check(config, plugins_loaded, checks)
    problems = refused + [Problem(p.path, p.message, line_of(p.path, lines)) for p in found]
    if problems:
        raise ConfigError(source, problems)
    return config


def dump(config: Config) -> dict[str, Any]:
    """Plain values of JSON that `load` reads as this configuration again: what looks like ${...} is text by now."""
    escaped = re.sub(r"(\\*)\$\{", r"\1\1\\\\${", config.model_dump_json())
    return dict(json.loads(escaped))


def flat(config: Config) -> dict[str, str]:
    """Returns all values, defaults too, by their dotted keys."""
    found: dict[str, str] = {}

    def add(key: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, one in value.items():
                add(f"{key}.{name}" if key else str(name), one)
        elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
            for place, one in enumerate(value):
                add(f"{key}.{place}", one)
        else:
            found[key] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    add("", config.model_dump(mode="json"))
    return found


def problems_of(error: ValidationError, lines: Lines, root: type[BaseModel] = Config) -> Iterator[Problem]:
    """Yields one problem for each key path."""
    found = dict(sentences(error, root))
    if root is Config and "tenants" in found:
        command = "" if satellites.find("tenants") else f"; the command is in {satellites.missing('tenants')}"
        found = {"tenants": f"is a key of `trinity tinker`'s YAML, not of a run's{command}"}
    yield from (Problem(path, said, line_of(path, lines)) for path, said in found.items())


def _score_by_models(values: dict[str, Any]) -> Iterator[str]:
    """Lets veRL's reward model, an auxiliary model, score tasksets that name neither workflow nor reward function.

    Yields the key path of each. Leaves any other document as it is.
    """
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
    """Tells if a section names a workflow or a reward function for its tasks."""
    form = section.get("format")
    columns = form if isinstance(form, dict) else {}
    return bool(section.get("workflow_args")) or any(section.get(n) for n in _NAMES) or any(map(columns.get, _COLUMNS))
