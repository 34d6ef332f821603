"""`trinity export`: ledger, experiences, metrics and dead letters of a run as Parquet files, for DuckDB or pandas.

Every file is written under another name first. Rows go to disk some thousands at a time, so that a run of any length
can be exported.
"""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from trinity.commands import command, group
from trinity.reading import series
from trinity.reading.client import Buffer
from trinity.reading.errors import RunError
from trinity.reading.reader import JobStage, any_buffer, find_job_stage
from trinity.reading.render import table
from trinity.study import view

app = group()

_ROWS = 10_000  # kept in memory of each file
_MOST_LETTERS = 1_000_000
_ALL_STEPS = 10**9
_ROLES = ("trainer", "explorer")

Row = dict[str, Any]

# Columns and their types, as docs/export.md lists them; a test compares the two.
TABLES: dict[str, dict[str, str]] = {
    "steps": {
        "step": "int64", "policy": "string", "written_at_seconds": "double", "reward_mean": "double",
        "groups": "int64", "rows": "int64", "dropped": "int64", "cut": "int64", "partial": "bool",
        "skip_reason": "string",
    },
    "groups": {
        "step": "int64", "position": "int64", "ordinal": "int64", "task_id": "string", "log_sequence": "int64",
        "reward_mean": "double", "staleness_steps": "int64", "use_count": "int64", "oldest_version": "int64",
        "newest_version": "int64", "stored": "int64", "kept": "int64", "masked": "int64", "response_tokens": "int64",
    },
    "dropped": {
        "step": "int64", "ordinal": "int64", "log_sequence": "int64", "reason": "string", "response_tokens": "int64",
    },
    "cut": {"step": "int64", "ordinal": "int64", "task_id": "string"},
    "samples": {
        "step": "int64", "index": "int64", "ordinal": "int64", "task_id": "string", "rollout": "int64",
        "turn": "int64", "reward": "double", "advantage": "double", "staleness": "int64", "prompt_tokens": "int64",
        "response_tokens": "int64", "truncation": "string", "log_sequence": "int64", "prompt": "string",
        "response": "string", "versions": "list<list<int64>>", "metrics": "map<string, double>",
    },
    "dead_letters": {
        "ordinal": "int64", "task_id": "string", "cause": "string", "attempts": "int64", "error": "string",
        "failed_at_seconds": "double",
    },
    "metrics": {"role": "string", "step": "int64", "time": "double", "name": "string", "value": "double"},
}  # fmt: skip
# Of samples, with --tokens.
TOKENS = {
    "token_ids": "list<int32>", "mask": "list<uint8>", "logprobs": "list<float>", "new_logprobs": "list<float>",
    "proximal_logprobs": "list<float>", "entropy": "list<float>", "clipped": "list<uint8>",
}  # fmt: skip


@command(app, "export", find_job_stage)
def export(
    job_stage: JobStage,
    parquet: Annotated[Path, typer.Option("--parquet", help="Folder to write; it must be empty or not there")],
    tokens: Annotated[bool, typer.Option("--tokens", help="Also the recorded values of each token")] = False,
) -> str:
    """Write ledger, experiences and metrics of a run as Parquet files."""
    if parquet.exists() and (not parquet.is_dir() or any(parquet.iterdir())):
        raise RunError(f"--parquet {parquet}: is no empty folder; name another one", 2)
    parquet.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".trinity-export-", dir=parquet.parent))
    try:
        counts = asyncio.run(_write(job_stage, folder, tokens))
        folder.chmod(0o755)
        folder.replace(parquet)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = table(list(counts.items()), {"file": lambda one: f"{one[0]}.parquet", "rows": lambda one: one[1]})
    return f"{parquet}\n{rows}"


async def _write(job_stage: JobStage, folder: Path, tokens: bool) -> dict[str, int]:
    """Writes the rows of each file."""
    with contextlib.ExitStack() as stack:
        columns = TABLES | {"samples": TABLES["samples"] | (TOKENS if tokens else {})}
        files = {name: stack.enter_context(_File(folder / f"{name}.parquet", columns[name])) for name in columns}
        async with any_buffer(job_stage) as reader:
            async for entry in _entries(reader.buffer):
                files["steps"].add([_step(entry)])
                files["groups"].add(_group(entry, place, one) for place, one in enumerate(entry["groups"]))
                for name in ("dropped", "cut"):
                    files[name].add({"step": entry["step"], **one} for one in entry[name])
            files["dead_letters"].add(asdict(one) for one in await reader.buffer.letters(_MOST_LETTERS))
        if job_stage.folders is not None:
            files["samples"].add(_samples(job_stage.folder, tokens))
            files["metrics"].add(_metrics(job_stage.folder))
    return {name: file.rows for name, file in files.items()}


async def _entries(buffer: Buffer) -> AsyncIterator[Row]:
    for step in range(1, await buffer.newest_step() + 1):
        yield await buffer.entry(step)


def _step(entry: Row) -> Row:
    return {**entry, **{name: len(entry[name]) for name in ("groups", "rows", "dropped", "cut")}}


def _group(entry: Row, position: int, one: Row) -> Row:
    oldest, newest = one["versions"]
    return {**one, "step": entry["step"], "position": position, "oldest_version": oldest, "newest_version": newest}


def _samples(folder: Path, tokens: bool) -> Iterator[Row]:
    """Yields every trained experience, newest step first; none if the trainer kept none.

    Raises RunError as `export`.
    """
    done: set[int] = set()

    def is_new(step: int) -> bool:
        return step not in done

    with contextlib.suppress(view.NothingKept):
        for step, rows in view.stretches(folder, is_new):
            yield from (_sample(index, row, tokens) for index, row in enumerate(rows))
            done |= {step} if rows else set()


def _sample(index: int, row: Row, tokens: bool) -> Row:
    try:
        found = view.with_arrays(row) if tokens else row
        return {**found, "index": index, "metrics": list((row.get("metrics") or {}).items())}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"samples: experience {index} of step {row.get('step')} is damaged: {error}") from None


def _metrics(folder: Path) -> Iterator[Row]:
    for role in _ROLES:
        for line in series.read(folder, role, _ALL_STEPS):
            for name, value in line.items():
                if name not in ("step", "time") and isinstance(value, (int, float)):
                    yield {"role": role, "step": line["step"], "time": line.get("time"), "name": name, "value": value}


class _File:
    """A Parquet file with these columns. Raises RunError if pyarrow is missing, or a value has another type."""

    def __init__(self, path: Path, columns: dict[str, str]) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ModuleNotFoundError:
            raise RunError("trinity export needs pyarrow: pip install -e '.[parquet]'") from None
        self.rows = 0
        self._path, self._arrow, self._kept = path, pyarrow, list[Row]()
        self._schema = pyarrow.schema([(name, _type(pyarrow, kind)) for name, kind in columns.items()])
        self._file = parquet.ParquetWriter(path, self._schema, compression="zstd")

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._file.close()

    def add(self, rows: Iterable[Row]) -> None:
        """Adds a row: only the file's columns, with null for missing ones."""
        for row in rows:
            self._kept.append({name: _storable(row.get(name)) for name in self._schema.names})
            self.rows += 1
            if len(self._kept) >= _ROWS:
                self._flush()

    def _flush(self) -> None:
        rows, self._kept = self._kept, []
        try:
            self._file.write_table(self._arrow.Table.from_pylist(rows, schema=self._schema))
        except (self._arrow.ArrowInvalid, self._arrow.ArrowTypeError, OverflowError) as error:
            raise RunError(f"{self._path.stem}: a value of the run has another type than its column: {error}") from None


def _storable(value: Any) -> Any:
    """Replaces halves of surrogate pairs, which UTF-8 lacks."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _type(pyarrow: Any, kind: str) -> Any:
    """Returns the type for a name in TABLES."""
    if kind.startswith("list<"):
        return pyarrow.list_(_type(pyarrow, kind[5:-1]))
    if kind == "map<string, double>":
        return pyarrow.map_(pyarrow.string(), pyarrow.float64())
    return {"double": pyarrow.float64(), "float": pyarrow.float32()}.get(kind) or pyarrow.type_for_alias(kind)
