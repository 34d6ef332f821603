"""From a YAML file to a checked Config. Everything wrong is reported together, with line, key and the nearest name."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trinity.config.advice import advice
from trinity.config.checks.sections import Check, check
from trinity.config.compatibility.translate import known_names, translate
from trinity.config.errors import ConfigError, Problem
from trinity.config.schema import Config

Lines = dict[str, int]


def load(
    path: str | Path, overrides: Sequence[str] = (), *, plugins_loaded: bool = True, checks: Iterable[Check] = ()
) -> Config:
    """The configuration in a YAML file, with `key.path=value` overrides on top.

    Without the plugins, names of workflows and reward functions are taken as they are. `checks` are those of other
    libraries. Raises ConfigError with every problem found.
    """
    source = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(source, [Problem("", "no such file")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(source, [Problem("", f"cannot be read: {error}")]) from None
    return parse(text, source, overrides, plugins_loaded=plugins_loaded, checks=checks)


def parse(
    text: str,
    source: str = "<config>",
    overrides: Sequence[str] = (),
    *,
    plugins_loaded: bool = True,
    checks: Iterable[Check] = (),
) -> Config:
    """As `load`, from the text itself."""
    lines = _lines(text, source)
    translated = translate(_interpolate(text, source, overrides))
    refused = [Problem(notice.path, notice.message, _line_of(notice.path, lines)) for notice in translated.refused]
    try:
        config = Config.model_validate(translated.values)
    except ValidationError as error:
        raise ConfigError(source, sorted([*refused, *_problems(error, lines)], key=lambda p: p.line)) from None
    config.note([*(str(notice) for notice in translated.notices), *advice(config)])
    found = check(config, plugins_loaded, checks)
    problems = refused + [Problem(p.path, p.message, _line_of(p.path, lines)) for p in found]
    if problems:
        raise ConfigError(source, problems)
    return config


def _lines(text: str, source: str) -> Lines:
    """Line of every key path; refuses what is no mapping, and keys given twice."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error)
        raise ConfigError(source, [Problem("", f"is not YAML: {what}", mark.line + 1 if mark else 0)]) from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(source, [Problem("", "must be a mapping of keys to values", root.start_mark.line + 1)])
    lines: Lines = {}
    problems = list(_walk(root, "", lines))
    if problems:
        raise ConfigError(source, problems)
    return lines


def _walk(node: yaml.Node, prefix: str, lines: Lines) -> Iterator[Problem]:
    if isinstance(node, yaml.MappingNode):
        children = [(str(key.value), key.start_mark.line + 1, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(str(index), value.start_mark.line + 1, value) for index, value in enumerate(node.value)]
    else:
        return
    seen: set[str] = set()
    for name, line, value in children:
        path = f"{prefix}.{name}" if prefix else name
        if name in seen:
            yield Problem(path, f"is given twice, first on line {lines[path]}{_other_name(path, value)}", line)
        seen.add(name)
        lines.setdefault(path, line)
        yield from _walk(value, path, lines)


def _other_name(path: str, node: yaml.Node) -> str:
    """A hint, if the second of two equal keys holds what only another, similar key takes."""
    *section, name = [int(part) if part.isdigit() else part for part in path.split(".")]
    known = _known_at(tuple(section))
    value: Any = {} if isinstance(node, yaml.MappingNode) else [] if isinstance(node, yaml.SequenceNode) else ""
    if known.get(str(name)) in (_shape(value), "", None):
        return ""
    near = _nearest(str(name), {other: shape for other, shape in known.items() if other != name}, value)
    return f"; did you mean {near!r} here?" if near else ""


def _line_of(path: str, lines: Lines) -> int:
    """Line of a key, or of the nearest section above it that is in the file."""
    while path:
        if path in lines:
            return lines[path]
        path = path.rpartition(".")[0]
    return 0


def _interpolate(text: str, source: str, overrides: Sequence[str]) -> Any:
    """The document with ${...} filled in and overrides applied."""
    try:
        document = OmegaConf.create(text) if text.strip() else OmegaConf.create()
        for override in overrides:
            if "=" not in override:
                raise ConfigError(source, [Problem(override, "is no override; write key.path=value")])
            key, _, value = override.partition("=")
            OmegaConf.update(document, key, yaml.safe_load(value) if value else None, force_add=True)
        return OmegaConf.to_container(document, resolve=True)
    except OmegaConfBaseException as error:
        message = str(error).splitlines()[0]
        raise ConfigError(source, [Problem(str(getattr(error, "full_key", "") or ""), message)]) from None
    except yaml.YAMLError as error:
        raise ConfigError(source, [Problem("", f"an override is not YAML: {error}")]) from None


def _problems(error: ValidationError, lines: Lines) -> Iterator[Problem]:
    for detail in error.errors():
        path = ".".join(str(part) for part in detail["loc"])
        yield Problem(path, _message(detail), _line_of(path, lines))


def _message(detail: ErrorDetails) -> str:
    kind, value, loc = detail["type"], detail.get("input"), detail["loc"]
    if kind == "extra_forbidden":
        known = _known_at(loc[:-1])
        near = _nearest(str(loc[-1]), known, value)
        hint = f"did you mean {near!r}?" if near else f"known here: {', '.join(sorted(known))}"
        return f"unknown key; {hint}"
    if kind == "missing":
        return "is required"
    text = detail["msg"].removeprefix("Value error, ")
    shown = repr(value) if not isinstance(value, Mapping | list) else f"a {_shape(value)}"
    if loc and isinstance(value, Mapping | list):  # perhaps the key is a letter short of one that takes such a value
        others = {name: shape for name, shape in _known_at(loc[:-1]).items() if name != loc[-1]}
        near = _nearest(str(loc[-1]), others, value)
        text += f"; did you mean {near!r}?" if near else ""
    elif kind in ("literal_error", "enum"):
        found = difflib.get_close_matches(str(value), detail["ctx"]["expected"].replace("'", "").split(", "), n=1)
        text += f"; did you mean {found[0]!r}?" if found else ""
    return f"is {shown}: {text[0].lower()}{text[1:]}"


def _known_at(loc: tuple[int | str, ...]) -> dict[str, str]:
    """Names known in the section at a key path, and the shape of what each takes; "" for any."""
    at = ["*" if str(part).isdigit() else str(part) for part in loc]
    at = at[2:] if at[:1] == ["stages"] else at
    fields = _section_at(loc).model_fields
    if len(loc) == 2 and loc[0] == "stages":  # a stage holds some of the sections that the whole holds
        return {name: _shape_of(field.annotation) for name, field in fields.items()}
    return {**dict.fromkeys(known_names(at), ""), **{name: _shape_of(f.annotation) for name, f in fields.items()}}


def _nearest(name: str, known: Mapping[str, str], value: Any) -> str:
    """The known name that is nearest to `name` and takes such a value; "" if none is near."""
    fitting = [other for other, shape in known.items() if shape in ("", _shape(value)) or value is None]
    for choice in (fitting, list(known)):
        near = difflib.get_close_matches(name, choice, n=1, cutoff=0.6 if choice is fitting else 0.5)
        if near:
            return near[0]
    return ""


def _shape(value: Any) -> str:
    return "mapping" if isinstance(value, Mapping) else "list" if isinstance(value, list) else "scalar"


def _shape_of(annotation: Any) -> str:
    """The shape of values of a field: a mapping, a list, or one value."""
    kinds = {getattr(a, "__origin__", a) for a in (annotation, *get_args(annotation))}
    if any(isinstance(kind, type) and issubclass(kind, (list, tuple)) for kind in kinds):
        return "list"
    if any(isinstance(kind, type) and issubclass(kind, (BaseModel, dict)) for kind in kinds):
        return "mapping"
    return "scalar"


def _section_at(loc: tuple[int | str, ...]) -> type[BaseModel]:
    """The schema class of the section at a key path."""
    section: type[BaseModel] = Config
    for part in loc:
        if isinstance(part, int) or part not in section.model_fields:  # an element, or a name of the user's
            continue
        found = next(_models(section.model_fields[part].annotation), None)
        if found is None:
            break
        section = found
    return section


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Schema classes inside an annotation such as `X | None` or `list[X]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
