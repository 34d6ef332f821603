"""Dataclasses as protobuf messages and back, by the names of their fields: what every `wire` module converts with.

A field that has another name or form on the wire is given by its wire module. Values are converted, not checked.
"""

from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

Kind = TypeVar("Kind")
Sent = TypeVar("Sent", bound=Message)


def to_message(value: Any, kind: type[Sent], /, **given: Any) -> Sent:
    """A message of `kind` with the fields of a dataclass, those inside it included; None leaves a field unset.

    `given` replaces fields and adds others. ValueError for a field that the message lacks, unless it is given as None.
    """
    return kind(**_plain(value, given), **{name: inner for name, inner in given.items() if inner is not None})


def from_message(kind: Callable[..., Kind], message: Any, /, **given: Any) -> Kind:
    """A dataclass from a message: repeated fields become tuples, a submessage that is not set None where it may be.

    `given` replaces fields. A field that the message lacks has its default.
    """
    known = message.DESCRIPTOR.fields_by_name
    read = {name: of(message) for name, of in _readers(kind) if name not in given and name in known}
    return kind(**read, **given)


def _plain(value: Any, given: Collection[str] = ()) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not is_dataclass(value):
        return value
    found = ((field.name, getattr(value, field.name)) for field in fields(value) if field.name not in given)
    return {name: _plain(inner) for name, inner in found if inner is not None}


@cache
def _readers(kind: Any) -> list[tuple[str, Callable[[Any], Any]]]:
    """The fields of a dataclass, and the function that reads each from a message."""
    hints = get_type_hints(kind)
    return [(field.name, _reader(field.name, hints[field.name])) for field in fields(kind)]


def _reader(name: str, hint: Any) -> Callable[[Any], Any]:
    inner: tuple[Any, ...] = get_args(hint)
    if get_origin(hint) is tuple:
        if is_dataclass(inner[0]):
            return lambda message: tuple(from_message(inner[0], item) for item in getattr(message, name))
        return lambda message: tuple(getattr(message, name))
    if NoneType in inner:
        read = _reader(name, inner[0])
        return lambda message: read(message) if message.HasField(name) else None
    if is_dataclass(hint):
        return lambda message: from_message(hint, getattr(message, name))  # type: ignore[arg-type]
    return lambda message: getattr(message, name)
