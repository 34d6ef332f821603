"""Base of all sections: unknown keys are errors, values are never converted to another type, numbers have limits."""

import re
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, model_validator

# No count, and no time in seconds, of a run is larger.
_LARGEST = 1_000_000_000

PositiveInt = Annotated[int, Field(ge=1, le=_LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=_LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0, le=_LARGEST)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=_LARGEST)]
# Rollouts of a task, tasks at the same time, engines, ranks.
SmallInt = Annotated[int, Field(ge=1, le=10_000)]
Tokens = Annotated[int, Field(ge=1, le=100_000_000)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Range = Annotated[tuple[NonNegativeFloat, NonNegativeFloat], Strict(False)]  # a YAML has lists, no tuples


def _as_engines_sample(temperature: float) -> float:
    if 0 < temperature < 0.01:
        raise ValueError("must be 0 or at least 0.01: vLLM samples at 0.01 below that, and the trainer would not know")
    return temperature


Temperature = Annotated[float, Field(ge=0, le=100), AfterValidator(_as_engines_sample)]


_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)|%([A-Za-z_]\w*)%", re.ASCII)


def _no_variable(parts: list[str]) -> None:
    for part in parts:
        if found := _VARIABLE.fullmatch(part):
            name = found[1] or found[2]
            raise ValueError(f"must have no variable of a shell: write ${{oc.env:{name}}} in place of {part}")


def _safe_parts(text: str) -> str:
    """Parts of a path below another: they cannot lead out of it, and every file system takes them."""
    _no_variable(text.split("/"))
    for part in text.split("/"):
        if part in ("", ".", ".."):
            raise ValueError("must be a name without empty, . and .. parts: it is a folder below checkpoint_root_dir")
        if len(part.encode(errors="replace")) > 200:
            raise ValueError("must have parts of at most 200 bytes: it is the name of a folder")
        if part != part.strip() or not part.isprintable():
            raise ValueError("must be printable, without spaces at its ends: it is the name of a folder")
    return text


def _safe_name(text: str) -> str:
    if "/" in text:
        raise ValueError("must have no /: it is the name of a folder")
    return _safe_parts(text)


def _environment_text(text: str) -> str:
    if "\0" in text:
        raise ValueError("must be text without NUL")
    return text


def _safe_path(text: str) -> str:
    if "\0" in text:
        raise ValueError("must be a path without NUL")
    if "://" not in text and any(len(part.encode(errors="replace")) > 255 for part in text.split("/")):
        raise ValueError("must have parts of at most 255 bytes: no file system takes longer names")
    _no_variable(re.split(r"[/\\]", text))
    if len(text.encode(errors="replace")) > 3_000:
        raise ValueError("must have at most 3000 bytes")
    try:
        Path(text).expanduser()
    except RuntimeError:
        raise ValueError("must not begin with ~ and a name that is no user of this machine") from None
    return text


def _local_path(text: str) -> str:
    if "://" in text:
        raise ValueError("must be a folder or file of this machine (or mounted here), no address")
    return _safe_path(text)


def _dataset_path(text: str) -> str:
    if "://" in text:
        raise ValueError("must be a file, a folder or a hub name, no address")
    return _safe_path(text)


# A host of labels of DNS, a port, folders. No escapes, since one may stand for a slash.
_URL_PREFIX = re.compile(r"https?://[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*(:(?P<port>\d{1,5}))?/([!-~]*/)?", re.ASCII)


def _url_prefix(text: str) -> str:
    found = _URL_PREFIX.fullmatch(text)
    if found is None or any(mark in text for mark in "?#%\\") or {".", ".."}.intersection(text.split("/")):
        what = "must be http:// or https://, a host in small letters, and folders, with / at the end"
        raise ValueError(f"{what}: https://example.org/pictures/")
    if not 0 < int(found["port"] or 1) <= 65_535:
        raise ValueError("must have a port of 1 to 65535, or none")
    return text


# Names of registered things and of columns.
Name = Annotated[str, Field(min_length=1)]
AnyPath = Annotated[str, Field(min_length=1), AfterValidator(_safe_path)]
OptionalPath = Annotated[str, AfterValidator(_safe_path)]
DatasetPath = Annotated[str, Field(min_length=1), AfterValidator(_dataset_path)]
UrlPrefix = Annotated[str, AfterValidator(_url_prefix)]
LocalPath = Annotated[str, Field(min_length=1), AfterValidator(_local_path)]
OptionalLocalPath = Annotated[str, AfterValidator(_local_path)]
EnvironmentText = Annotated[str, AfterValidator(_environment_text)]
FolderPath = Annotated[str, AfterValidator(_safe_parts)]
OptionalFolderPath = Annotated[str, AfterValidator(lambda text: text and _safe_parts(text))]
FolderName = Annotated[str, AfterValidator(_safe_name)]

_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FRACTION = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_BOOLS = {"true": True, "false": False}


class Arguments(BaseModel):
    """Arguments of what the YAML names."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, strict=True, allow_inf_nan=False)


class Section(Arguments):
    """A mapping in the YAML."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, values: Any) -> Any:
        """Environment variables are text: `${oc.env:STEPS}` may be a number, and true or false."""
        if not isinstance(values, dict):
            return values
        fields = cls.model_fields
        return {
            name: _from_texts(value, fields[name].annotation) if name in fields else value
            for name, value in values.items()
        }


def _from_texts(value: Any, annotation: Any) -> Any:
    """Reads a field's text, or the texts of its list, as values of its types. Returns other values unchanged."""
    if isinstance(value, list):
        return [from_text(one, _kinds_of_items(annotation)) if isinstance(one, str) else one for one in value]
    return from_text(value, _kinds(annotation)) if isinstance(value, str) else value


def from_text(text: str, kinds: set[Any]) -> Any:
    """The value that text stands for, where a field of these types takes no text."""
    if str in kinds:
        return text
    if bool in kinds and text in _BOOLS:
        return _BOOLS[text]
    if kinds & {int, float} and len(text) < 64:
        if _NUMBER.fullmatch(text):
            return int(text)
        if float in kinds and _FRACTION.fullmatch(text):
            return float(text)
    return text


def _kinds(annotation: Any) -> set[Any]:
    """The plain types of a field's values; those of its choices, for a Literal."""
    if hasattr(annotation, "__metadata__"):
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(_kinds, get_args(annotation)))
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)} - {str}
    return {annotation}


def _kinds_of_items(annotation: Any) -> set[Any]:
    """Returns the plain types of the items of a field's lists. A field that takes no list has none."""
    inner = get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _kinds_of_items(inner[0])
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(_kinds_of_items, inner))
    return set().union(*map(_kinds, inner)) if get_origin(annotation) in (list, tuple) else set()
