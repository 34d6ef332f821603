"""Write the files that follow from the declarations of algorithms and their parts: `make docs`. A test compares them.

The files are lib/config's builtin.json, which `trinity check` reads, and the tables of names in docs/algorithms.md.
"""

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trinity.plugins import declarations
from trinity.plugins.arguments import Argument
from trinity.plugins.declarations import Algorithm, Declaration

MODULES = (
    "trinity.trainer.algorithms.advantages",
    "trinity.trainer.algorithms.loss",
    "trinity.data.selectors",
    "trinity.buffer.window.policy",
)
ROOT = Path(__file__).parents[1]
BUILTIN = ROOT / "lib/config/src/trinity/plugins/builtin.json"
PAGE = ROOT / "docs/algorithms.md"
BEGIN, END = "<!-- {}: written by `make docs` -->", "<!-- end of {} -->"


def files() -> dict[Path, str]:
    """Returns every file and its text."""
    for module in MODULES:
        importlib.import_module(module)
    return {BUILTIN: table(), PAGE: page(PAGE.read_text())}


def table() -> str:
    """Returns the built-in declarations as JSON, one per line."""
    sections = []
    for title, registry in declarations.REGISTRIES.items():
        rows = [json.dumps(_row(registry[name]), ensure_ascii=False) for name in sorted(registry.declared)]
        sections.append(f'"{title}": [\n' + ",\n".join(rows) + "\n]")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def _row(one: Declaration | Algorithm) -> dict[str, Any]:
    if isinstance(one, Declaration) and one.alias_of:
        return {"name": one.name, "alias_of": one.alias_of, "module": one.module}
    if isinstance(one, Declaration):
        one = replace(one, function=None, keep=None, peers=None)
    row = {key: value for key, value in asdict(one).items() if value or key == "repeat_times"}
    if isinstance(one, Declaration):
        row["args"] = {name: _short(argument) for name, argument in one.args.items()}
    return row


def _short(argument: Argument) -> dict[str, Any]:
    values = asdict(argument)
    return {"default": values.pop("default")} | {k: v for k, v in values.items() if v or (v == 0 and v is not False)}


def page(text: str) -> str:
    for title, registry in declarations.REGISTRIES.items():
        begin, end = BEGIN.format(title), END.format(title)
        if begin in text:
            before, rest = text.split(begin)
            rows = _algorithms() if title == "algorithms" else _parts(registry)
            text = before + "\n".join([begin, *rows, end]) + rest.split(end)[1]
    return text


def _algorithms() -> Iterator[str]:
    yield "| `algorithm_type` | advantage | policy loss | KL, entropy | repeat | |\n|---|---|---|---|---|---|"
    for name, one in sorted(declarations.ALGORITHMS.items()):
        parts = (one.advantage, one.policy_loss, one.kl_loss, one.entropy_loss)
        advantage, loss, *terms = (f"`{part}`" if part and part != "none" else "-" for part in parts)
        given = [f"`{key}: {_shown(value)}`" for args in one.args.values() for key, value in args.items()]
        if one.sample_strategy != "default":
            given.append(f"`sample_strategy: {one.sample_strategy}`")
        if one.loss_aggregation != "token-mean":
            given.append(f"`loss_agg_mode: {one.loss_aggregation}`")
        both = ", ".join(terms) if set(terms) != {"-"} else "-"
        yield f"| `{name}` | {advantage} | {loss} | {both} | {one.repeat_times} | {', '.join(given)} |".replace(
            "|  |", "| |"
        )


def _parts(registry: declarations.Registry[Declaration]) -> Iterator[str]:
    yield "| name | formula | arguments and defaults | source |\n|---|---|---|---|"
    for name, one in sorted(registry.items()):
        if one.alias_of:
            yield f"| `{name}` | as `{one.alias_of}` | | |"
            continue
        own = {key: argument.default for key, argument in one.args.items() if key not in registry.args}
        if own.get("loss_agg_mode", "") is None:
            del own["loss_agg_mode"]
        args = ", ".join(f"`{key}={_shown(default)}`" for key, default in own.items())
        formula = one.formula.replace("|", "\\|")
        yield f"| `{name}` | {formula} | {args} | {one.source} |".replace("|  |", "| |")


def _shown(value: Any) -> str:
    return {"None": "null", "True": "true", "False": "false", "1e-06": "1e-6"}.get(str(value), str(value))


if __name__ == "__main__":
    old = [path for path, text in files().items() if path.read_text() != text]
    if "--check" in sys.argv:
        sys.exit("; ".join(f"{path.relative_to(ROOT)} is old, run `make docs`" for path in old) or None)
    for path in old:
        path.write_text(files()[path])
