"""Values of veRL's options (Hydra's grammar, the part that scripts use) as YAML.

A number keeps its spelling: `1e-6` stays `1e-6`. A value in quotes is always text.

hydra-core's parser was tried (1.3.8) and would replace only the forty lines below. It gives values, not spellings
(`1e-6` becomes 1e-06), refuses a list over several lines and `${oc.env:ROOT,${oc.env:HOME}/data}/gsm8k`, which scripts
have, and needs antlr4 4.9 and omegaconf below 2.4, where math-verify here needs antlr4 4.13.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from trinity.import_verl.expand import default_of

NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_REFERENCE = r"\$\{(?:[^{}]|\$\{[^{}]*\})*\}"
_ITEM = re.compile(rf"""(?:{_REFERENCE}|'(?:\\'|[^'])*'|"(?:\\"|[^"])*"|\[[^\[\]]*\]|\{{[^{{}}]*\}}|[^,'"])+""", re.S)


@dataclass(frozen=True)
class Leaf:
    """A scalar as it stands in the YAML, and what the comment behind it says."""

    text: str
    comment: str = ""


Node: TypeAlias = Leaf | dict[str, "Node"] | list["Node"]


def node_of(value: str, comment: str = "") -> Node:
    """An option's value: a scalar, a list `[a, b]` or a mapping `{a: b}`."""
    value = value.strip()
    if value.startswith("[") and value.endswith("]"):
        return [node_of(item, comment) for item in _items(value[1:-1])]
    if value.startswith("{") and value.endswith("}"):
        pairs = (item.partition(":") for item in _items(value[1:-1]))
        return {_unquoted(key.strip()): node_of(inside, comment) for key, _, inside in pairs}
    if value.lower() in _CONSTANTS:
        return Leaf(_CONSTANTS[value.lower()], comment)
    if NUMBER.fullmatch(value):
        return Leaf(value, comment)
    return text_leaf(_unquoted(value), comment)


def text_leaf(text: str, comment: str = "") -> Leaf:
    """Text, in quotes only where YAML would read something else."""
    try:
        plain = yaml.safe_load(f"key: {text}") == {"key": text} and not NUMBER.fullmatch(text)
    except (yaml.YAMLError, ValueError):  # ValueError: of 2026-13-01
        plain = False
    return Leaf(text if plain else json.dumps(text, ensure_ascii=False), comment)


def loaded(node: Node) -> Any:
    """Returns the value that the YAML will hold. A reference to the environment counts as its default."""
    if isinstance(node, dict):
        return {key: loaded(inside) for key, inside in node.items()}
    if isinstance(node, list):
        return [loaded(item) for item in node]
    value = yaml.safe_load(node.text)
    return default_of(value) if isinstance(value, str) else value


def texts_of(value: str) -> list[str]:
    """The items of a list as text; a single value is a list of one."""
    value = value.strip()
    items = _items(value[1:-1]) if value.startswith("[") and value.endswith("]") else [value]
    return [_unquoted(item.strip()) for item in items]


def text_of(value: str) -> str:
    """A value as text: the first item of a list, and an empty list as it is written."""
    return next(iter(texts_of(value)), value)


def is_true(value: str) -> bool:
    """A reference to the environment counts as its default."""
    return _unquoted(default_of(value.strip())).lower() == "true"


def is_null(value: str) -> bool:
    return value.strip().lower() in ("null", "none", "")


def _items(inside: str) -> Iterator[str]:
    return (found[0] for found in _ITEM.finditer(inside) if found[0].strip())


def _unquoted(value: str) -> str:
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1].replace(f"\\{value[0]}", value[0]) if quoted else value
