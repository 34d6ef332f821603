"""Operators of data-juicer by their own names, where py-data-juicer is installed: filters, deduplicators, selectors,
and mappers that keep rows.

Tried with py-data-juicer 1.6.1. What its operators find out about a row (`__dj__stats__`) is kept for the scores.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trinity.data.datasets import DatasetError, Row
from trinity.data.task_pipeline.base import Context, Entry

INSTALL = "an operator of data-juicer needs `pip install py-data-juicer ray`"

_KINDS = ("filter", "deduplicator", "selector", "mapper")
_NUMBER, _TEXT, _STATS = "__trinity_row__", "__trinity_text__", "__dj__stats__"


def is_installed() -> bool:
    return importlib.util.find_spec("data_juicer") is not None


def known() -> list[str]:
    """Names of its operators, by their files: importing it takes long."""
    spec = importlib.util.find_spec("data_juicer")
    places = [Path(place, "ops", kind) for place in (spec.submodule_search_locations or [] if spec else [])
              for kind in _KINDS]  # fmt: skip
    return sorted(file.stem for place in places for file in place.glob("*.py") if not file.stem.startswith("_"))


def apply(name: str, args: Mapping[str, Any], entries: list[Entry], context: Context) -> list[Entry]:
    """The rows that one of its operators leaves, with what it changed in them. Raises DatasetError."""
    if not entries:
        return []
    table, text_key = _table(args, entries, context)
    options = {"text_key": text_key, "num_proc": context.num_process, **args}
    try:
        with _installing_nothing():
            before, after = _run(name, options, table)
    except Exception as error:  # its operators raise anything
        raise DatasetError(f"data-juicer's {name} failed: {type(error).__name__}: {error}") from error
    if any(_NUMBER not in row for row in after):
        raise DatasetError(
            f"data-juicer's {name} makes new rows; only operators that keep or leave out rows can be used"
        )
    return [_entry(name, entries[row[_NUMBER]], before[row[_NUMBER]], row) for row in after]


def _run(name: str, options: dict[str, Any], table: dict[str, list]) -> tuple[list[Row], list[Row]]:
    """The rows as Arrow has them, and what the operator makes of them."""
    import datasets
    from data_juicer.core.data import NestedDataset
    from data_juicer.ops import OPERATORS

    if name not in OPERATORS.modules:
        raise ValueError("it has no such operator")
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        given = NestedDataset(datasets.Dataset.from_dict(table))
        return given.to_list(), OPERATORS.modules[name](**options).run(given).to_list()
    finally:
        if shown:
            datasets.enable_progress_bars()


@contextmanager
def _installing_nothing() -> Iterator[None]:
    """data-juicer installs packages it lacks, torch and ray among them, into the environment of the run. Not here."""
    from data_juicer.utils.lazy_loader import LazyLoader as loader

    installs = loader.__dict__["_install_package"]

    def refuse(cls: Any, package: str, *_: Any) -> None:
        raise ImportError(f"package {package!r} is not installed")

    loader._install_package = classmethod(refuse)
    try:
        yield
    finally:
        loader._install_package = installs


def _table(args: Mapping[str, Any], entries: list[Entry], context: Context) -> tuple[dict[str, list], str]:
    """All columns, and the name of the one with the text: the target field itself, if it is one and holds text."""
    columns = dict.fromkeys(column for entry in entries for column in entry.row)
    table: dict[str, list] = {column: [entry.row.get(column) for entry in entries] for column in columns}
    table[_NUMBER] = list(range(len(entries)))
    if "text_key" in args:
        return table, str(args["text_key"])
    found = context.texts(entries)
    if len(context.fields) == 1 and table[context.fields[0]] == found:
        return table, context.fields[0]
    table[_TEXT] = found
    return table, _TEXT


def _entry(name: str, entry: Entry, before: Mapping[str, Any], after: Mapping[str, Any]) -> Entry:
    """A row as it came back. Values that the operator did not touch keep their form from before Arrow."""
    theirs = {key: value for key, value in after.items() if key != _NUMBER and not key.startswith("__dj__")}
    changed = {key: value for key, value in theirs.items() if key not in before or before[key] != value}
    if _TEXT in changed:
        raise DatasetError(
            f"data-juicer's {name} edits the text, which is joined from several columns; give text_key in its args"
        )
    stats = after.get(_STATS) or {}
    numbers = {key: float(value) for key, value in stats.items() if isinstance(value, int | float)}
    return Entry(entry.number, {**entry.row, **changed}, {**entry.stats, **numbers})
