"""The output file of a pipeline and its manifest. A restart reuses the file if the manifest matches."""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity.data.datasets import DatasetError, Row
from trinity.runtime import files

VERSION = 1
SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Manifest:
    """Operators and inputs of an output file. Rows are numbered from 0 over all inputs."""

    pipeline: dict[str, Any]
    """Operators, fields, weights and limits of the YAML."""
    inputs: list[dict[str, Any]]
    """path, split, subset, digest, first and rows of each input."""
    rows: list[int]
    """For each row of the file, its row in the input."""
    steps: list[dict[str, Any]]
    seconds: float
    digest: str
    """SHA-256 of the file."""

    def differs(self, pipeline: dict[str, Any], digests: Sequence[str]) -> str:
        """Returns the difference as text; empty for an equal pipeline and equal inputs."""
        keys = [key for key in pipeline if pipeline[key] != self.pipeline.get(key)]
        if keys:
            return f"made with other {', '.join(keys)}"
        return "" if list(digests) == [one["digest"] for one in self.inputs] else "made from other input"


def manifest_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.manifest.json")


def read_manifest(output: Path) -> Manifest | None:
    """Returns None for a missing or foreign manifest."""
    try:
        value = json.loads(manifest_path(output).read_bytes())
        return Manifest(**value["made"]) if value["version"] == VERSION else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write(output: Path, rows: Sequence[Row], manifest: Manifest) -> None:
    """Write file and manifest atomically. Raises OSError, or DatasetError for rows that parquet cannot hold.

    The manifest is written first: a manifest without a file is ignored, a file without a manifest would be refused.
    """
    content = _parquet(rows) if output.suffix == ".parquet" else b"".join(_line(row) for row in rows)
    made = {**manifest.__dict__, "digest": hashlib.sha256(content).hexdigest()}
    files.write_atomic(manifest_path(output), json.dumps({"version": VERSION, "made": made}).encode())
    files.write_atomic(output, content)


def digest_of(paths: Sequence[Path]) -> str:
    """SHA-256 of the concatenated files."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def _line(row: Row) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False, default=_as_text).encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can escape and UTF-8 cannot hold
        return json.dumps(row, default=_as_text).encode() + b"\n"


def _as_text(value: Any) -> str:
    """Text for values that JSON lacks. Bytes, which may be an image, become a URL that is read as one."""
    return f"data:;base64,{base64.b64encode(value).decode()}" if isinstance(value, bytes) else str(value)


def _parquet(rows: Sequence[Row]) -> bytes:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DatasetError("parquet needs pyarrow; pip install -e '.[parquet]', or end output in .jsonl") from None
    columns = dict.fromkeys(column for row in rows for column in row)
    sink = pyarrow.BufferOutputStream()
    try:
        parquet.write_table(pyarrow.table({c: [row.get(c) for row in rows] for c in columns}), sink)
    except (ValueError, TypeError, NotImplementedError) as error:  # base classes of pyarrow's errors
        raise DatasetError(f"the rows do not fit into parquet: {error}; end output in .jsonl") from None
    return bytes(sink.getvalue().to_pybytes())
