"""Operators of data-juicer by their names, if py-data-juicer is installed: filters, deduplicators, selectors, mappers.

Mappers must keep rows. Tested with py-data-juicer 1.6.1. The statistics that its operators compute for a row
(`__dj__stats__`) are kept for the scores.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trinity.data.datasets import DatasetError, Row
from trinity.task_pipeline.base import Candidate, Context

INSTALL = "an operator of data-juicer needs `pip install py-data-juicer ray`"

_KINDS = ("filter", "deduplicator", "selector", "mapper")
_NUMBER, _TEXT, _STATS = "__trinity_row__", "__trinity_text__", "__dj__stats__"


def is_installed() -> bool:
    return importlib.util.find_spec("data_juicer") is not None


def known() -> list[str]:
    """Names of its operators, found by their files because its import is slow."""
    spec = importlib.util.find_spec("data_juicer")
    places = [Path(place, "ops", kind) for place in (spec.submodule_search_locations or [] if spec else [])
              for kind in _KINDS]  # fmt: skip
    return sorted(file.stem for place in places for file in place.glob("*.py") if not file.stem.startswith("_"))


def apply(name: str, args: Mapping[str, Any], candidates: list[Candidate], context: Context) -> list[Candidate]:
    """The rows that one of its operators keeps, with its changes. Raises DatasetError."""
    if not candidates:
        return []
    table, text_key = _table(args, candidates, context)
    options = {"text_key": text_key, "num_proc": context.num_process, **args}
    try:
        with _installing_nothing():
            before, after = _run(name, options, table)
    except Exception as error:  # its operators raise errors of any type
        raise DatasetError(f"data-juicer's {name} failed: {type(error).__name__}: {error}") from error
    if any(_NUMBER not in row for row in after):
        raise DatasetError(
            f"data-juicer's {name} makes new rows; only operators that keep or leave out rows can be used"
        )
    return [_changed(name, candidates[row[_NUMBER]], before[row[_NUMBER]], row) for row in after]


def _run(name: str, options: dict[str, Any], table: dict[str, list]) -> tuple[list[Row], list[Row]]:
    """The rows before and after the operator, both read back from Arrow."""
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
    """Prevents data-juicer from installing missing packages, such as torch and ray, into the run's environment."""
    from data_juicer.utils.lazy_loader import LazyLoader as loader

    installs = loader.__dict__["_install_package"]

    def refuse(cls: Any, package: str, *_: Any) -> None:
        raise ImportError(f"package {package!r} is not installed")

    loader._install_package = classmethod(refuse)
    try:
        yield
    finally:
        loader._install_package = installs


def _table(args: Mapping[str, Any], candidates: list[Candidate], context: Context) -> tuple[dict[str, list], str]:
    """All columns, and the name of the text column: the target field if it is a single column of text."""
    columns = dict.fromkeys(column for candidate in candidates for column in candidate.row)
    table: dict[str, list] = {column: [candidate.row.get(column) for candidate in candidates] for column in columns}
    table[_NUMBER] = list(range(len(candidates)))
    if "text_key" in args:
        return table, str(args["text_key"])
    found = context.texts(candidates)
    if len(context.fields) == 1 and table[context.fields[0]] == found:
        return table, context.fields[0]
    table[_TEXT] = found
    return table, _TEXT


def _changed(name: str, candidate: Candidate, before: Mapping[str, Any], after: Mapping[str, Any]) -> Candidate:
    """A row after the operator. Unchanged values keep their type from before Arrow."""
    theirs = {key: value for key, value in after.items() if key != _NUMBER and not key.startswith("__dj__")}
    changed = {key: value for key, value in theirs.items() if key not in before or before[key] != value}
    if _TEXT in changed:
        raise DatasetError(
            f"data-juicer's {name} edits the text, which is joined from several columns; give text_key in its args"
        )
    stats = after.get(_STATS) or {}
    numbers = {key: float(value) for key, value in stats.items() if isinstance(value, int | float)}
    return Candidate(candidate.number, {**candidate.row, **changed}, {**candidate.stats, **numbers})
