"""Write docs/configuration.md from the schema: `make docs`. A test compares the file with what this writes."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from trinity.config.compatibility.foreign_keys import IGNORED, RENAMED, UNSUPPORTED, VALUES
from trinity.config.foreign_correction import MEANINGS
from trinity.config.names import MONITOR_ARGS, REWARD_FUNCTIONS, SELECTOR_ARGS, WORKFLOWS
from trinity.config.schema import Config

TARGET = Path(__file__).parent / "configuration.md"
HEAD = """# Configuration

Written by `make docs` from the schema (lib/config); do not edit. A key that is not here is an error,
which names the nearest one. `${oc.env:VAR,default}` takes an environment variable, `${a.b}` another key, and
`trinity run --config F a.b=value` replaces one. `trinity check --config F` shows what a file would do.
"""


def document() -> str:
    parts = [HEAD, *_sections(Config, "", set()), _names(), _others()]
    return "\n".join(parts).rstrip() + "\n"


def _sections(model: type[BaseModel], path: str, seen: set[type]) -> Iterator[str]:
    """A table for a section, then for those inside it; a class that came before is referred to."""
    seen.add(model)
    doc = (model.__doc__ or "").strip().replace("\n    ", "\n")
    yield f"## {path or 'Top level'}\n\n{doc}\n\n| key | values | default | meaning |\n|---|---|---|---|"
    yield "\n".join(_row(name, field) for name, field in model.model_fields.items()) + "\n"
    for name, field in model.model_fields.items():
        for inner in _models(field.annotation):
            place = f"{path}.{name}" if path else name
            if inner in seen:
                yield f"## {place}\n\nAs {inner.__name__.removesuffix('Config')} above.\n"
            elif inner.__name__ != "StageConfig":
                yield from _sections(inner, place + ("[]" if "list[" in str(field.annotation) else ""), seen)


def _row(name: str, field: Any) -> str:
    below = "see below" if next(_models(field.annotation), None) else ""
    meaning = (field.description or below).replace("|", "\\|")
    return f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {meaning} |"


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        inner = [_type(a) for a in get_args(annotation) if a is not type(None)]
        *first, last = [*inner, "null"] if type(None) in get_args(annotation) else inner
        return f"{', '.join(first)} or {last}"
    if get_origin(annotation) is list:
        return f"list of {_type(get_args(annotation)[0])}"
    if get_origin(annotation) is tuple:
        return f"{len(get_args(annotation))} numbers"
    if get_origin(annotation) is dict or annotation is dict:
        return "mapping"
    if hasattr(annotation, "__metadata__"):
        return _type(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    names = {str: "text", bool: "true, false", int: "integer", float: "number"}
    return names.get(annotation, str(annotation))


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    if field.default is PydanticUndefined:
        value = field.default_factory() if field.default_factory else None
        return "" if isinstance(value, BaseModel) else f"`{value}`"
    if field.default in (None, ""):
        return "null" if field.default is None else "empty"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _names() -> str:
    selectors = "\n".join(f"- `{name}` {args or ''}".rstrip() for name, args in SELECTOR_ARGS.items())
    monitors = "\n".join(f"- `{name}`: {', '.join(args) or 'no arguments'}" for name, args in MONITOR_ARGS.items())
    return (
        f"## Names\n\nWorkflows: {', '.join(f'`{n}`' for n in WORKFLOWS)}. Reward functions: "
        f"{', '.join(f'`{n}`' for n in REWARD_FUNCTIONS)}. Both may come from plugins (docs/plugins.md).\n\n"
        f"Selectors and their kwargs:\n\n{selectors}\n\nMonitors and their monitor_args:\n\n{monitors}\n"
    )


def _others() -> str:
    """Keys of other systems."""
    lines = ["## Keys of Trinity-RFT and veRL that are taken\n", "### Old names\n", "| key | means |", "|---|---|"]
    lines += [f"| `{old}` | `{new}` |" for old, new in RENAMED.items()]
    lines += [
        f"| `{key}`: {', '.join(values)} | {', '.join(values.values())} |" for key, values in VALUES.items() if values
    ]
    lines += ["| `algorithm.bypass_old_logprobs` | `algorithm.rollout_correction.bypass_mode`, below |"]
    lines += [f"| `algorithm.rollout_correction.{key}` | {meaning} |" for key, meaning in MEANINGS.items()]
    lines += ["\n### Without effect\n", "| key | why |", "|---|---|"]
    lines += [f"| `{key}` | {reason} |" for key, reason in IGNORED.items()]
    lines += ["\n### Refused, unless the value asks for nothing\n", "| key | why |", "|---|---|"]
    lines += [f"| `{key}` | {reason} |" for key, reason in UNSUPPORTED.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    text = document()
    if "--check" in sys.argv:
        sys.exit(TARGET.read_text() != text and "docs/configuration.md is old; run `make docs`")
    TARGET.write_text(text)
