"""From a YAML file to a checked Config. Everything wrong is reported together, with line, key and the nearest name."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trinity.config.advice import advice
from trinity.config.checks.sections import Check, check
from trinity.config.compatibility.translate import translate
from trinity.config.document import Lines, line_of, read_document, read_text
from trinity.config.errors import ConfigError, Problem
from trinity.config.hints import Location, annotation_at, sentence
from trinity.config.schema import Config

_MOST_SENTENCES = 100  # a search for the nearest name takes milliseconds


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
    """As `load`, from the text itself."""
    document, lines = read_document(text, source, overrides)
    translated = translate(document)
    refused = [Problem(notice.path, notice.message, line_of(notice.path, lines)) for notice in translated.refused]
    try:
        config = Config.model_validate(translated.values)
    except ValidationError as error:
        raise ConfigError(source, sorted([*refused, *_problems(error, lines)], key=lambda p: p.line)) from None
    config.note([*(str(notice) for notice in translated.notices), *advice(config)])
    found = check(config, plugins_loaded, checks)
    problems = refused + [Problem(p.path, p.message, line_of(p.path, lines)) for p in found]
    if problems:
        raise ConfigError(source, problems)
    return config


def dump(config: Config) -> dict[str, Any]:
    """Plain values of JSON that `load` reads as this configuration again: what looks like ${...} is text by now."""
    escaped = re.sub(r"(\\*)\$\{", r"\1\1\\\\${", config.model_dump_json())
    return dict(json.loads(escaped))


def _problems(error: ValidationError, lines: Lines) -> Iterator[Problem]:
    """One for each key path: pydantic reports every alternative of a union by itself."""
    found: dict[Location, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_key_path(detail), []).append(detail)
    for number, (location, details) in enumerate(found.items()):
        path = ".".join(str(part) for part in location)
        what = sentence(location, details) if number < _MOST_SENTENCES else "is wrong"
        yield Problem(path, what, line_of(path, lines))


def _key_path(detail: ErrorDetails) -> Location:
    """The location without the names of a union's alternatives behind the field."""
    location = detail["loc"]
    if detail["type"] in ("extra_forbidden", "missing"):
        return location
    while location and annotation_at(location) is None:
        location = location[:-1]
    return location
