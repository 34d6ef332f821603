"""Reads a YAML file into plain values and the lines of its keys. Refuses a file that is too large or too deep.

The events of the parser are counted before anything is built of them, so no file takes more than about a second.
"""

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml.reader import ReaderError

from trinity.config.errors import OVERRIDE, ConfigError, Problem
from trinity.config.hints import known_at, nearest_for_shape
from trinity.config.interpolation import interpolation_problems, resolution_problem
from trinity.config.schema.base import from_text

Lines = dict[str, int]

_LARGEST_BYTES = 512 * 1024
_LARGEST_NODES = 5_000
_TOO_LARGE = f"is too large; a YAML has at most {_LARGEST_BYTES // 1024} KiB"
_DEEPEST = 32
_LONGEST_NUMBER = 64
_MOST_INTERPOLATIONS = 32
_VARIABLE = re.compile(r"\$\{\s*oc\.env:[^${}]*\}")
_INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")  # \${ is text
_YAML = "tag:yaml.org,2002:"
_TAGS = {f"{_YAML}{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map", "merge")}
_KEY_TAGS = {f"{_YAML}str", f"{_YAML}merge"}
_NUMBERS = {
    f"{_YAML}int": re.compile(r"[-+]?(0|[1-9][0-9]*)"),
    f"{_YAML}float": re.compile(
        r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    ),
}


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Numbers are those of YAML 1.2, and dates are text: 1e-6 is a number; 1_000, 010 and 1:30 are text."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, form) for tag, form in forms if tag not in (*_NUMBERS, f"{_YAML}timestamp")]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


for _tag, _form in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_form.pattern})\Z"), list("-+.0123456789"))


def read_text(path: str | Path) -> str:
    """Returns the text of a YAML file without a byte order mark. Raises ConfigError."""
    place, source = Path(path), str(path)
    try:
        info = place.stat()
        if stat.S_ISREG(info.st_mode) and info.st_size <= _LARGEST_BYTES:
            with place.open("rb") as file:  # those of /proc have no size, and may not end
                return file.read(_LARGEST_BYTES + 1).decode("utf-8-sig")
        what = _TOO_LARGE if stat.S_ISREG(info.st_mode) else "is no file; give a YAML file"
    except FileNotFoundError:
        what = "no such file; give the path of a YAML"
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 text (byte {error.start}); save it as UTF-8"
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    except ValueError:  # a NUL in the path
        source, what = repr(source), "is no path of a file"
    raise ConfigError(source, [Problem("", what)])


def read_document(text: str, source: str, overrides: Sequence[str]) -> tuple[dict[str, Any], Lines]:
    """Returns the mapping in a YAML, with ${...} filled in and overrides applied, and the line of every key path.

    Raises ConfigError with all problems of one kind.
    """
    root = _compose(text, source)
    if root is None:
        return _resolved({}, {}, source, overrides), {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(source, [Problem("", "must be a mapping of keys to values", root.start_mark.line + 1)])
    lines: Lines = {}
    problems = list(_walk(root, "", lines))
    if problems:
        raise ConfigError(source, problems)
    return _resolved(_construct(root, source), lines, source, overrides), lines


def line_of(path: str, lines: Lines) -> int:
    """Line of a key, or of the nearest section above it that is in the file; 0 if there is none.

    OVERRIDE for a value of the command line.
    """
    while path:
        if path in lines:
            return lines[path]
        path = path.rpartition(".")[0]
    return 0


def _compose(text: str, source: str) -> yaml.Node | None:
    """Returns the tree of a text. Raises ConfigError for a text above the limits."""
    try:
        if problem := _over_limits(text):
            raise ConfigError(source, [problem])
        return yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        problem = _not_yaml(error)
        if isinstance(error, ReaderError):
            problem = replace(problem, line=text.count("\n", 0, error.position) + 1)
        raise ConfigError(source, [problem]) from None


def _not_yaml(error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    fix = "; indent with spaces, and put text that begins with @, ` or % in quotes" if "any token" in what else ""
    return Problem("", f"is not YAML: {what}{fix}", mark.line + 1 if mark else 0)


@dataclass
class _Measure:
    """A list or mapping that is being read: its nodes so far with those of its aliases, and its height."""

    anchor: str | None = None
    nodes: int = 1
    height: int = 1

    def add(self, nodes: int, height: int) -> None:
        self.nodes += nodes
        self.height = max(self.height, height + 1)


@dataclass
class _Anchors:
    """Sizes of what has a name, and the names whose content is still being read."""

    done: dict[str | None, tuple[int, int]] = field(default_factory=dict)
    open: set[str | None] = field(default_factory=set)


def _over_limits(text: str) -> Problem | None:
    """Finds too many nodes, too deep a tree, or an alias inside its own anchor."""
    if len(text) > _LARGEST_BYTES:
        return Problem("", _TOO_LARGE)
    stack, anchors = [_Measure()], _Anchors()
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1  # type: ignore[union-attr]
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in anchors.open:
                return Problem("", f"*{event.anchor} is inside what &{event.anchor} names; it would never end", line)
            stack[-1].add(*anchors.done.get(event.anchor, (1, 1)))
        elif isinstance(event, yaml.ScalarEvent):
            stack[-1].add(1, 1)
            if event.anchor:
                anchors.done[event.anchor] = (1, 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            stack.append(_Measure(event.anchor))
            if event.anchor:
                anchors.open.add(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            closed = stack.pop()
            stack[-1].add(closed.nodes, closed.height)
            if closed.anchor:
                anchors.open.discard(closed.anchor)
                anchors.done[closed.anchor] = (closed.nodes, closed.height)
        if len(stack) - 1 + stack[-1].height - 1 > _DEEPEST:
            return Problem("", f"lists and mappings are nested more than {_DEEPEST} deep", line)
        if stack[-1].nodes > _LARGEST_NODES:
            what = "with what its aliases repeat" if anchors.done else "keys and values together"
            return Problem("", f"has more than {_LARGEST_NODES} nodes, {what}", line)
    return None


def _walk(node: yaml.Node, prefix: str, lines: Lines) -> Iterator[Problem]:
    """Notes the line of every key. Yields keys given twice, keys that are no text, tags, and ambiguous numbers."""
    line = node.start_mark.line + 1
    if node.tag not in _TAGS:
        name = node.tag.replace("tag:yaml.org,2002:", "!!")
        yield Problem(prefix, f"has the tag {name}; remove it, a value needs none here", line)
    elif isinstance(node, yaml.ScalarNode):
        if problem := _scalar_problem(node):
            yield Problem(prefix, problem, line)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            path = f"{prefix}.{index}" if prefix else str(index)
            lines.setdefault(path, value.start_mark.line + 1)
            yield from _walk(value, path, lines)
    elif isinstance(node, yaml.MappingNode):
        yield from _walk_mapping(node, prefix, lines)


def _walk_mapping(node: yaml.MappingNode, prefix: str, lines: Lines) -> Iterator[Problem]:
    seen: set[str] = set()
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or key.tag not in _KEY_TAGS:
            shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            yield Problem(prefix, f"has the key {shown or 'null'}, must be text; write it in quotes", line)
            continue
        if key.tag == f"{_YAML}merge":
            yield from _walk(value, prefix, lines)
            continue
        path = f"{prefix}.{key.value}" if prefix else key.value
        if key.value in seen:
            yield Problem(path, f"is given twice, first on line {lines[path]}{_other_name(path, value)}", line)
        seen.add(key.value)
        lines.setdefault(path, line)
        yield from _walk(value, path, lines)


def _other_name(path: str, node: yaml.Node) -> str:
    """Suggests a similar key, if the second of two equal keys has a value that only the similar key takes."""
    is_list, is_mapping = isinstance(node, yaml.SequenceNode), isinstance(node, yaml.MappingNode)
    shape = "mapping" if is_mapping else "list" if is_list else "scalar"
    near = nearest_for_shape(path.split("."), shape)
    return f"; did you mean {near!r} here?" if near else ""


def _scalar_problem(node: yaml.ScalarNode) -> str:
    """Says why a scalar is refused; empty if it is not."""
    if (count := len(_INTERPOLATION.findall(node.value))) > _MOST_INTERPOLATIONS:
        return f"has {count} interpolations, may have {_MOST_INTERPOLATIONS}"
    if node.tag == f"{_YAML}bool" and node.value.lower() not in _Loader.bool_values:
        return f"is {node.value!r}, must be true or false"
    if node.tag == f"{_YAML}null" and node.value.lower() not in ("", "~", "null"):
        return f"is {node.value!r} with the tag !!null; remove the tag"
    form = _NUMBERS.get(node.tag)
    if form is None:
        return ""
    if len(node.value) > _LONGEST_NUMBER:
        return f"is a number of {len(node.value)} characters, may have {_LONGEST_NUMBER}"
    return "" if form.fullmatch(node.value) else f"is {node.value!r}, must be a number"


def _construct(node: yaml.Node, source: str) -> Any:
    loader = _Loader("")
    try:
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(source, [_not_yaml(error)]) from None
    finally:
        loader.dispose()


def _resolved(values: dict[str, Any], lines: Lines, source: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Applies the overrides, then fills in ${...}."""
    try:
        document = OmegaConf.create(values)
        for override in overrides:
            for key in _override(document, override, source):
                for replaced in [path for path in lines if path.startswith(f"{key}.")]:
                    del lines[replaced]
                lines[key] = OVERRIDE
        plain: Any = OmegaConf.to_container(document, resolve=False)
        problems = [Problem(p.path, p.message, line_of(p.path, lines)) for p in interpolation_problems(plain)]
        if problems:
            raise ConfigError(source, problems)
        resolved: Any = OmegaConf.to_container(document, resolve=True, throw_on_missing=True)
        resolved = _with_numbers(plain, resolved)
        problem = next(_no_text(resolved, ""), None)
    except (OmegaConfBaseException, RecursionError) as error:
        problem = resolution_problem(error)
    if problem is not None:
        raise ConfigError(source, [Problem(problem.path, problem.message, line_of(problem.path, lines))])
    return dict(resolved)


def _with_numbers(plain: Any, resolved: Any, arguments: bool = False) -> Any:
    """Reads environment variables in `..._args` as YAML would: no schema says which arguments are numbers."""
    if isinstance(plain, dict) and isinstance(resolved, dict):
        return {
            name: _with_numbers(plain[name], value, arguments or str(name).endswith("args"))
            for name, value in resolved.items()
        }
    if isinstance(plain, list) and isinstance(resolved, list):
        return [_with_numbers(*pair, arguments) for pair in zip(plain, resolved, strict=True)]
    if arguments and isinstance(plain, str) and isinstance(resolved, str) and _VARIABLE.fullmatch(plain.strip()):
        return from_text(resolved, {bool, int, float})
    return resolved


def _no_text(value: Any, path: str) -> Iterator[Problem]:
    """Yields text that is not UTF-8, from environment variables or the command line: no file can hold it."""
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _no_text(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, str) and not value.isascii() and (found := re.search("[\ud800-\udfff]", value)):
        yield Problem(path, f"has {found[0]!r}, which is no UTF-8 text")


def _override(document: Any, override: str, source: str) -> list[str]:
    """Replaces a value. Returns its key, and those above it that it makes sections or lists."""
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")) or key.count(".") > _DEEPEST:
        what = "is no override; write key.path=value"
        what += "; a YAML is --config FILE, a run's folder --job FOLDER" if os.path.exists(override) else ""
        raise ConfigError(source, [Problem(override, what)])
    try:
        node = _compose(text, source)
        if node is not None and (problems := list(_walk(node, key, {}))):
            raise ConfigError(source, [Problem(problem.path, problem.message) for problem in problems])
        value = None if node is None else _construct(node, source)
        names = key.split(".")
        above = [".".join(names[:depth]) for depth in range(1, len(names))]
        made = [path for path in above if not OmegaConf.is_config(OmegaConf.select(document, path))]
        for path, name in zip(above, names[1:], strict=True):
            _begin_list(document, path, name)
        OmegaConf.update(document, key, value, force_add=True)
        return [*made, key]
    except ConfigError as error:
        found = [Problem(problem.path or key, f"{problem.message} (an override)") for problem in error.problems]
        raise ConfigError(source, found) from None
    except yaml.YAMLError as error:
        raise ConfigError(source, [Problem(key, f"{_not_yaml(error).message} (an override)")]) from None
    except (OmegaConfBaseException, ValueError, TypeError, IndexError, AttributeError, AssertionError) as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        message = _no_entry(document, key) or f"cannot be replaced: {what}"
        raise ConfigError(source, [Problem(key, message)]) from None


def _begin_list(document: Any, path: str, name: str) -> None:
    """Gives a list of the schema that is empty its first entry, for the name 0 below it."""
    *section, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    if not name.isdigit() or known_at(tuple(section)).get(str(last)) != "list":
        return
    if OmegaConf.select(document, path) in (None, []):
        OmegaConf.update(document, path, [{}] if name == "0" else [], force_add=True)


def _no_entry(document: Any, key: str) -> str:
    """Says why a key leads to no entry of a list; empty if it does not lead into a list."""
    names = key.split(".")
    for depth, name in enumerate(names):
        place = OmegaConf.select(document, ".".join(names[:depth])) if depth else document
        if OmegaConf.is_list(place) and name not in map(str, range(len(place))):
            fix = f"give its number, from 0 to {len(place) - 1}" if len(place) else "the list is empty; begin with 0"
            return f"{'.'.join(names[:depth])} has no entry {name!r}: {fix}"
    return ""
