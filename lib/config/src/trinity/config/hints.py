"""Guesses the meaning of a wrong key or value: the nearest name that takes such a value, and the type of a field."""

import difflib
from collections.abc import Iterator, Mapping
from enum import EnumType
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trinity.config.errors import without_credentials
from trinity.config.schema import Config
from trinity.plugins import satellites

Location = tuple[int | str, ...]
_MOST_SENTENCES = 100  # a search for the nearest name takes milliseconds


def problems_in(values: dict[str, Any], root: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yields (dotted key path, what is wrong) for the problems of values by their schema."""
    try:
        root.model_validate(values)
    except ValidationError as error:
        yield from sentences(error, root)


def sentences(error: ValidationError, root: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yields (dotted key path, what is wrong), each path once: pydantic reports every alternative of a union."""
    found: dict[Location, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_key_path(detail, root), []).append(detail)
    for number, (path, details) in enumerate(found.items()):
        said = _sentence(path, details, root) if number < _MOST_SENTENCES else "is wrong"
        yield ".".join(str(part) for part in path), said


def _key_path(detail: ErrorDetails, root: type[BaseModel]) -> Location:
    """The location without the names of a union's alternatives behind the field."""
    location = detail["loc"]
    if detail["type"] in ("extra_forbidden", "missing"):
        return location
    while location and annotation_at(location, root) is None:
        location = location[:-1]
    return location


def _sentence(path: Location, details: list[ErrorDetails], root: type[BaseModel]) -> str:
    """Says in one sentence which value at a key path is wrong and which is right, out of pydantic's details."""
    detail = details[0]
    kind, value = detail["type"], detail.get("input")
    if kind == "extra_forbidden":
        known = known_at(path[:-1], root)
        near = nearest(str(path[-1]), known, value)
        hint = f"did you mean {near!r}?" if near else f"known here: {', '.join(sorted(known))}"
        if path == ("actor_rollout_ref",):
            hint = "a YAML of veRL is not read; `trinity import-verl SCRIPT -o FILE` converts the script that starts it"
        if root is Config and satellites.find("foreign_keys") is None:
            hint += f"; keys of Trinity-RFT need {satellites.missing('foreign_keys')}"
        return f"unknown key; {hint}"
    if kind == "missing":
        return "is required"
    said = _must(details, annotation_at(path, root))
    text = said if kind == "value_error" and isinstance(value, Mapping) else f"is {shown(value)}, {said}"
    if isinstance(value, Mapping | list) and path:  # the key may be a misspelt other key that takes such a value
        others = {name: shape for name, shape in known_at(path[:-1], root).items() if name != path[-1]}
        near = nearest(str(path[-1]), others, value, surely=True)
    else:
        near = next(iter(difflib.get_close_matches(str(value), _choices(annotation_at(path, root)), n=1)), "")
    return text + (f"; did you mean {near!r}?" if near else "")


def _must(details: list[ErrorDetails], annotation: Any) -> str:
    """The type of the field, or the limit that its value misses, as `must be ...`."""
    kind, message = details[0]["type"], details[0]["msg"]
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"):
        return message.replace("Input should be ", "must be ")
    if kind == "string_too_short" or (kind == "too_short" and _shape_of(annotation) == "list"):
        return "must not be empty"
    if kind == "string_pattern_mismatch":
        return f"must match {details[0]['ctx']['pattern']}"
    if kind == "too_long" and get_origin(annotation) is not tuple:
        return f"must have at most {details[0]['ctx']['max_length']} entries"
    return f"must be {describe(annotation)}"


def shown(value: Any) -> str:
    """A value as a YAML has it."""
    if isinstance(value, Mapping | list):
        return "a mapping" if isinstance(value, Mapping) else "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = without_credentials(repr(value))
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def describe(annotation: Any) -> str:
    """Describes the values of a field: `a whole number`, `one of a, b`, `text or null`."""
    if hasattr(annotation, "__metadata__"):
        return describe(get_args(annotation)[0])
    if get_origin(annotation) is Literal or isinstance(annotation, EnumType):
        names = [str(value) for value in get_args(annotation) or annotation]
        return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    if get_origin(annotation) in (Union, UnionType):
        kinds = [
            word
            for inner in get_args(annotation)
            for word in (("true", "false") if inner is bool else (describe(inner),))
        ]
        *first, last = dict.fromkeys(kinds)
        return f"{', '.join(first)} or {last}" if first else last
    if get_origin(annotation) is list:
        (inner,) = get_args(annotation)
        inner = get_args(inner)[0] if hasattr(inner, "__metadata__") else inner
        return f"a list of {_PLURALS.get(inner, 'mappings')}"
    if get_origin(annotation) is tuple:
        return f"a list of {len(get_args(annotation))} numbers"
    return _WORDS.get(annotation, "a mapping")


_WORDS = {
    str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null",
    Any: "a value", dict: "a mapping",
}  # fmt: skip
_PLURALS = {str: "texts", int: "whole numbers", float: "numbers"}


def annotation_at(path: Location, root: type[BaseModel] = Config) -> Any:
    """The annotation of the field at a key path; None where the path leads to no field."""
    annotation: Any = root
    for part in path:
        annotation = _inside(annotation, part)
        if annotation is None:
            return None
    return annotation


def _inside(annotation: Any, part: int | str) -> Any:
    """The annotation of an entry of what `annotation` stands for."""
    for kind in _alternatives(annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if part in kind.model_fields:
                return kind.model_fields[str(part)].annotation
        elif get_origin(kind) in (list, tuple) and isinstance(part, int):
            return get_args(kind)[0]
        elif get_origin(kind) is dict and isinstance(part, str):
            return get_args(kind)[1]
    return None


def _alternatives(annotation: Any) -> Iterator[Any]:
    if hasattr(annotation, "__metadata__"):
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        for inner in get_args(annotation):
            yield from _alternatives(inner)
    else:
        yield annotation


def _choices(annotation: Any) -> list[str]:
    found = [get_args(kind) for kind in _alternatives(annotation) if get_origin(kind) is Literal]
    return [str(value) for values in found for value in values]


def known_at(path: Location, root: type[BaseModel] = Config) -> dict[str, str]:
    """Names known in the section at a key path, and the shape of what each takes; "" for any."""
    at = ["*" if str(part).isdigit() else str(part) for part in path]
    at = at[2:] if at[:1] == ["stages"] else at
    fields = _section_at(path, root).model_fields
    shapes = {name: _shape_of(field.annotation) for name, field in fields.items()}
    if len(path) == 2 and path[0] == "stages":  # a stage holds some of the sections that the whole holds
        return shapes
    foreign_keys = satellites.find("foreign_keys") if root is Config else None
    return {**dict.fromkeys(foreign_keys.known_names(at) if foreign_keys else (), ""), **shapes}


def nearest(name: str, known: Mapping[str, str], value: Any, surely: bool = False) -> str:
    """The known name that is nearest to `name` and takes such a value; "" if none is near.

    `surely`: one letter apart, for a name that is known too.
    """
    fitting = [other for other, shape in known.items() if shape in ("", shape_of_value(value)) or value is None]
    if surely:
        return next(iter(difflib.get_close_matches(name, fitting, n=1, cutoff=0.87)), "")
    for choice in (fitting, list(known)):
        near = difflib.get_close_matches(name, choice, n=1, cutoff=0.6 if choice is fitting else 0.5)
        if near:
            return near[0]
    return ""


def nearest_for_shape(path: list[str], shape: str) -> str:
    """Another key than the one at `path`, that is near and takes a value of this shape; "" if the key does itself."""
    *section, name = [int(part) if part.isdigit() else part for part in path]
    known = known_at(tuple(section))
    if known.get(str(name)) in (shape, "", None):
        return ""
    value: Any = {"mapping": {}, "list": []}.get(shape, "")
    return nearest(str(name), {other: kind for other, kind in known.items() if other != name}, value)


def shape_of_value(value: Any) -> str:
    return "mapping" if isinstance(value, Mapping) else "list" if isinstance(value, list) else "scalar"


def _shape_of(annotation: Any) -> str:
    """The shape of values of a field: a mapping, a list, or one value."""
    kinds = {get_origin(kind) or kind for kind in _alternatives(annotation)}
    if kinds & {list, tuple}:
        return "list"
    if any(isinstance(kind, type) and issubclass(kind, (BaseModel, dict)) for kind in kinds):
        return "mapping"
    return "scalar"


def _section_at(path: Location, root: type[BaseModel]) -> type[BaseModel]:
    """The schema class of the section at a key path, or of the nearest one above."""
    section: type[BaseModel] = root
    annotation: Any = root
    for part in path:
        annotation = _inside(annotation, part)
        found = [kind for kind in _alternatives(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        section = found[0] if found else section
    return section
