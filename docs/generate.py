"""Write docs/configuration.md from the schema, and the table of docs/security.md: `make docs`.

A test compares the files with what this writes.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import wrap
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from trinity.compat_rft.correction import MEANINGS
from trinity.compat_rft.tables import RENAMED, SAME, VALUES
from trinity.config.names import MONITOR_ARGS
from trinity.config.schema import Config
from trinity.plugins.declarations import SELECTORS
from trinity.runtime.trust.roles import METHODS, Role
from trinity.runtime.trust.subjects import table

TARGET = Path(__file__).parent / "configuration.md"
SECURITY = Path(__file__).parent / "security.md"
HEAD = """# Configuration

Reference of every key of a YAML, written by `make docs` from the schema (lib/config): its values, default and meaning.
Sections have headings. `${oc.env:VAR,default}` is an environment variable, `${a.b}` another key.
`trinity run --config F a.b=value` replaces a key; `trinity check --config F` shows the plan.
"""
FOREIGN = """## Keys of Trinity-RFT and veRL

Trinity reads YAMLs of Trinity-RFT unchanged ([compatibility.md](compatibility.md)). It also takes the following keys.
Below, `<taskset>` is any taskset of `buffer.explorer_input`, `<buffer>` the experience buffer or an auxiliary one,
`<engine>` the rollout model or an auxiliary one, and `<verl>` is `trainer.trainer_config`.
"""
WITHOUT_EFFECT = """`trinity check` names such keys of a YAML, with the reason or the replacement. The lists are in
[foreign.yaml](../satellites/trinity_rft/src/trinity/compat_rft/foreign.yaml). A refused key is accepted if its value
means off. Some keys without effect take only certain values:
"""
# Texts that several sections share.
_PLACES = (
    ("buffer.explorer_input.taskset.", "<taskset>."),
    ("buffer.explorer_input.tasksets.*.", "<taskset>."),
    ("buffer.explorer_input.eval_tasksets.*.", "<taskset>."),
    ("buffer.trainer_input.experience_buffer.", "<buffer>."),
    ("buffer.trainer_input.auxiliary_buffers.*.", "<buffer>."),
    ("explorer.rollout_model.", "<engine>."),
    ("explorer.auxiliary_models.*.", "<engine>."),
    ("trainer.trainer_config.", "<verl>."),
)


def document() -> str:
    parts = [HEAD, *_sections(Config, "", {}), _names(), FOREIGN, *_foreign()]
    return "\n".join(parts).rstrip() + "\n"


def _sections(model: type[BaseModel], path: str, seen: dict[type[BaseModel], str]) -> Iterator[str]:
    """Yields a list of keys for a section, then for the sections inside it; links to a class that came before."""
    seen[model] = path
    doc = (model.__doc__ or "").strip().replace("\n    ", "\n")
    shared = {name for base in model.__bases__ if issubclass(base, BaseModel) for name in base.model_fields}
    sibling = next(
        (seen[other] for other in seen if other is not model and shared and shared <= other.model_fields.keys()), ""
    )
    more = f"\n\nBeside these, the keys of `{sibling}` from `engine_num` to `engine_args`." if sibling else ""
    fields = {name: field for name, field in model.model_fields.items() if not sibling or name not in shared}
    lines = "\n".join(_lines(fields, path, seen))
    yield f"## {path or 'Top level'}\n\n{doc}{more}\n\n{lines}\n"
    for name, field in fields.items():
        for inner in _models(field.annotation):
            if inner not in seen and inner.__name__ != "StageConfig":
                place = f"{path}.{name}" if path else name
                yield from _sections(inner, place + ("[]" if "list[" in str(field.annotation) else ""), seen)


def _lines(fields: dict[str, Any], path: str, seen: dict[type[BaseModel], str]) -> Iterator[str]:
    """Yields a row for each key; links to a section that an earlier key shares."""
    named = dict(seen)
    for name, field in fields.items():
        line = _line(name, field, named)
        if not line.endswith(": section."):  # the section has its own heading
            yield line
        for inner in _models(field.annotation):
            named.setdefault(inner, f"{path}.{name}" if path else name)


def _line(name: str, field: Any, seen: dict[type[BaseModel], str]) -> str:
    inner = next(_models(field.annotation), None)
    if name == "stages":
        values = "list of `stage_name`, with `mode` and sections that replace those above"
    else:
        many = {list: "list, each ", dict: "by name, each "}.get(get_origin(field.annotation), "")
        values = f"{many}as `{seen[inner]}`" if inner in seen else _type(field.annotation)
    default = _default(field)
    if values == "bool" and default:
        values, default = default, ""
    meaning = field.description or ""
    if meaning and meaning.split()[0][-1] not in ":;,":  # keeps the name of a choice
        meaning = meaning[0].upper() + meaning[1:]
    return f"- `{name}`: {values}{f'; {default}' if default else ''}.{f' {meaning}.' if meaning else ''}"


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
    names = {str: "text", bool: "bool", int: "integer", float: "number"}
    return names.get(annotation, str(annotation))


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    if field.default is PydanticUndefined:
        value = field.default_factory() if field.default_factory else None
        return "" if isinstance(value, BaseModel) or not value else f"`{value}`"
    if field.default in (None, ""):
        return "" if field.default is None else "empty"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _names() -> str:
    selectors = "\n".join(f"- `{name}` {one.defaults or ''}".rstrip() for name, one in sorted(SELECTORS.items()))
    monitors = "\n".join(f"- `{name}`: {', '.join(args) or 'no arguments'}" for name, args in MONITOR_ARGS.items())
    return (
        "## Names\n\n[Workflows](workflows.md) and [reward functions](environments_builtin.md#maths) have pages;\n"
        "[plugins](plugins.md) add to them.\n\n"
        f"Selectors and their kwargs:\n\n{selectors}\n\nMonitors and their monitor_args:\n\n{monitors}\n"
    )


def _foreign() -> Iterator[str]:
    """Yields the keys of other systems, in lists by their fate."""
    targets: dict[str, list[str]] = defaultdict(list)
    for old, new in RENAMED.items():
        everywhere = _short(old, set(RENAMED))
        targets[_short(new, set()) if everywhere != old else new].append(old)
    lines = list(_renamed(targets))
    lines += [
        f"- `{key}`: {', '.join(f'`{old}` is `{new}`' for old, new in values.items())}"
        for key, values in VALUES.items() if values
    ]  # fmt: skip
    lines.append("- `algorithm.bypass_old_logprobs`: `algorithm.rollout_correction.bypass_mode`")
    lines += [f"- `algorithm.rollout_correction.{key}`: {meaning}" for key, meaning in MEANINGS.items()]
    yield "\n".join(["### Old names of a key above\n", *lines, ""])
    same: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for key, (values, _) in SAME.items():
        same[values].append(key)
    only = [
        line
        for values, keys in same.items()
        for line in _wrapped(f"- {_keys(keys)}: refused unless {' or '.join(f'`{one}`' for one in values)}")
    ]
    yield "\n".join(["### Without effect, or refused\n", WITHOUT_EFFECT, *only, ""])


def _renamed(targets: dict[str, list[str]]) -> Iterator[str]:
    """Yields a line for each of our keys, and one line for a section whose keys only moved."""
    moved: dict[tuple[str, str], list[str]] = defaultdict(list)
    for new, old in targets.items():
        ours, _, name = new.rpartition(".")
        theirs, _, its_name = _short(old[0], {old[0]}).rpartition(".")
        if len(old) == 1 and name == its_name:
            moved[theirs, ours].append(name)
        else:
            yield f"- {_keys(old)}: `{new}`"
    for (theirs, ours), names in moved.items():
        if len(names) == 1:
            yield f"- `{theirs}.{names[0]}`: `{ours}.{names[0]}`"
        else:
            yield f"- `{theirs}` ({', '.join(names)}): `{ours}`, same names"


def _wrapped(text: str) -> list[str]:
    return wrap(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _keys(keys: Iterable[str]) -> str:
    return ", ".join(_shown(keys))


def _shown(keys: Iterable[str]) -> list[str]:
    """Groups keys by their sections: `section` (key, key); merges sections with the same keys."""
    names: dict[str, list[str]] = defaultdict(list)
    ordered = list(keys)
    given = set(ordered)
    for key in dict.fromkeys(_short(key, given) for key in ordered):
        holder, _, name = key.removesuffix(".**").rpartition(".")
        names[holder].append(name)
    together: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for holder, found in names.items():
        together[tuple(found)].append(holder)
    shown = []
    for keys_there, holders in together.items():
        if len(keys_there) == 1:
            shown += [f"`{holder}.{keys_there[0]}`".replace("`.", "`") for holder in holders]
        else:
            sections = " and ".join(f"`{holder}`" if holder else "top level" for holder in holders)
            shown.append(f"{sections} ({', '.join(keys_there)})")
    return shown


def _short(key: str, given: set[str]) -> str:
    """Shortens the section of a key if all sections of the short name have the key in `given`."""
    for place, name in _PLACES:
        if key.startswith(place):
            same = [other + key.removeprefix(place) for other, its_name in _PLACES if its_name == name]
            return name + key.removeprefix(place) if not given or given.issuperset(same) else key
    return key


def security() -> str:
    """Returns docs/security.md with today's tables of methods and NATS subjects by role."""
    text = SECURITY.read_text()
    for name, rows in (("roles and methods", _permissions()), ("roles and subjects", _subjects())):
        begin, end = f"<!-- {name}: written by `make docs` -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = before + begin + "".join(rows) + end + rest.split(end)[1]
    return text


def _subjects() -> Iterator[str]:
    """Returns a row for each set of roles, with the subjects that they may publish, without JetStream's API."""
    roles: dict[str, list[str]] = defaultdict(list)
    for role, granted in table().items():
        for subject in granted.publish:
            if not subject.startswith("$JS."):
                roles[subject].append(role)
    rows: dict[str, list[str]] = defaultdict(list)
    for subject, publish in roles.items():
        rows[", ".join(publish)].append(f"`{subject}`")
    yield "\n| roles | subjects that they may publish |\n|---|---|\n"
    for publish_roles, names in rows.items():
        yield f"| {publish_roles} | {', '.join(names)} |\n"
    yield "\n"


def _permissions() -> Iterator[str]:
    services: dict[str, dict[tuple[Role, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    for path, allowed in METHODS.items():
        _, service, method = path.split("/")
        services[service][tuple(role for role in Role if role in allowed)].append(method)
    yield "\n| service | methods | roles that may call them |\n|---|---|---|\n"
    for service, by_roles in services.items():
        for roles, methods in by_roles.items():
            named = "every role" if len(roles) == len(Role) else ", ".join(roles)
            yield f"| {service.rpartition('.')[2]} | {', '.join(methods)} | {named} |\n"
    yield "\n"


if __name__ == "__main__":
    for target, text in ((TARGET, document()), (SECURITY, security())):
        if "--check" not in sys.argv:
            target.write_text(text)
        elif target.read_text() != text:
            sys.exit(f"docs/{target.name} is old; run `make docs`")
