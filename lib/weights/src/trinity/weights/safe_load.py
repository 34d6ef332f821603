"""Reads files of torch.save without running code in them.

Torch's restricted unpickler (`weights_only`) rebuilds tensors and plain containers. Callers name the few other classes
that a file may hold. Every other global ends the reading.
"""

import contextlib
import io
import pickle
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from trinity.runtime.errors import InvalidInput

_ZIP = b"PK\x03\x04"
_REFUSED = re.compile(r"GLOBAL (\S+)")


def load_safely(path: Path, allowed: Sequence[Any], *, mapped: bool = True) -> dict[str, Any]:
    """Returns the dict in a file, on the CPU. `mapped`: tensors are views of the file where its format allows.

    `allowed`: classes, or pairs of a class and the name under which the file knows it. Raises InvalidInput if the file
    is missing, damaged, or asks for another global.
    """
    found = load_any(path, allowed, mapped=mapped)
    if not isinstance(found, dict):
        raise InvalidInput(str(path), f"holds a {type(found).__name__}, not a state dict")
    return found


def load_any(path: Path, allowed: Sequence[Any], *, mapped: bool = True, span: tuple[int, int] | None = None) -> object:
    """Returns an object of any type. `span`: first byte and length of the part that torch.save wrote."""
    if not path.is_file():
        raise InvalidInput(str(path), "is missing")
    source: Path | io.BytesIO = path
    try:
        with path.open("rb") as file:
            if span is not None:
                mapped = False
                file.seek(span[0])
                source = io.BytesIO(file.read(span[1]))
            can_map = mapped and file.read(len(_ZIP)) == _ZIP
        with _only(allowed):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=can_map)
    except Exception as error:  # a damaged pickle can raise anything
        if refused := _REFUSED.search(str(error)):
            raise InvalidInput(str(path), f"asks for {refused[1]}, which no checkpoint needs; it was refused") from None
        first = (str(error).rpartition("WeightsUnpickler error:")[2].strip().splitlines() or [""])[0][:200]
        raise InvalidInput(str(path), f"is damaged ({type(error).__name__}: {first})") from None


def _member(enum: Any, name: str) -> Any:
    """Stands for getattr, by which early Pythons 3.11 (Debian's 3.11.2) pickle an enum's members.

    A class that stands for an enum has `member_by_name`. UnpicklingError for anything else.
    """
    if isinstance(enum, type) and isinstance(name, str) and hasattr(enum, "member_by_name"):
        return enum.member_by_name(name)
    if not (isinstance(enum, type) and issubclass(enum, Enum) and name in enum.__members__):
        raise pickle.UnpicklingError(f"GLOBAL getattr({enum!r:.80}, {name!r:.80})")
    return enum[name]


@contextlib.contextmanager
def _only(allowed: Sequence[Any]) -> Iterator[None]:
    """Allows only these classes, and none that other modules have allowed (torch allows the real DTensor)."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals([*allowed, (_member, "builtins.getattr")]):
            yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
