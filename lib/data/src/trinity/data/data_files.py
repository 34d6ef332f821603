"""Reads the rows of a file (jsonl, json, csv, tsv, parquet, arrow, also compressed), and finds the files of a folder.

A file that holds something else is named for what it is. Rows keep the file's order, and integers their exact values.
"""

import csv
import io
import json
import math
import re
from collections.abc import Collection, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from trinity.data.tables import DatasetError, Row

TEXTS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv")
TABLES = (".parquet", ".arrow")
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
FORMS = "jsonl, json, csv, tsv, parquet or arrow"

_HEAD_BYTES = 512
_HEADER_CHARACTERS = 100_000
_SHOWN_NAMES = 8
# The first bytes of files that hold no rows: what they are, and the fix.
_OTHERS = {
    b"version https://git-lfs": "is a Git LFS pointer, not the data; run `git lfs pull` in its folder, or download the "
    "file itself",
    b"<": "is an HTML or XML page, such as a login or error page, not the data; download the file again, with a token "
    "if its site asks for one",
    b"PK\x03\x04": "is a zip archive or a workbook; unpack it and give a file of it, or save its table as csv",
    b"\xfd7zXZ": "is compressed by xz; unpack it, or compress it by gzip or zstd",
    b"SQLite format 3": "is an SQLite database; export the table as jsonl or csv",
}
_KINDS = {
    b"\x1f\x8b": (".gz", "compressed by gzip"),
    b"\x28\xb5\x2f\xfd": (".zst", "compressed by zstd"),
    b"BZh": (".bz2", "compressed by bzip2"),
    b"PAR1": (".parquet", "a parquet file"),
    b"ARROW1": (".arrow", "an arrow file"),
}
_TAR = slice(257, 262)


def kind_of(file: Path) -> str:
    """A file's suffix, without that of a compression."""
    return Path(file.stem if file.suffix.lower() in COMPRESSED else file.name).suffix.lower()


def is_data(file: Path) -> bool:
    return kind_of(file) in (*TEXTS, *TABLES)


def read_file(file: Path, texts: Collection[str] = ()) -> list[Row]:
    """All rows of a file. `texts`: columns of csv that stay texts. Raises DatasetError naming file, line and cause."""
    try:
        with file.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
        _check_kind(file, head)
        packed = file.suffix.lower() in COMPRESSED
        if kind_of(file) in TABLES:
            return _read_table(file, _unpacked(file) if packed else None)
        data = _unpacked(file) if packed else file.read_bytes()
        if packed:
            _check_content(file, data[:_HEAD_BYTES])
        text = data.decode(json.detect_encoding(data))
    except DatasetError:
        raise
    except UnicodeDecodeError as error:
        raise DatasetError(f"{file}: cannot be read: {error}; save it as UTF-8") from None
    except (OSError, ValueError, OverflowError) as error:  # base classes of pyarrow's errors; dates after 9999
        raise DatasetError(f"{file}: cannot be read: {error}") from None
    return _read_csv(file, text, texts) if kind_of(file) in (".csv", ".tsv") else _read_json(file, text)


def _check_kind(file: Path, head: bytes) -> None:
    """Raises DatasetError if the first bytes are of another kind of file than its name says."""
    _check_content(file, head)
    named = file.suffix.lower()
    suffix, what = next((kind for mark, kind in _KINDS.items() if head.startswith(mark)), ("", ""))
    if suffix and suffix != named:
        raise DatasetError(f"{file}: is {what}, which its name does not say; rename it to end in {suffix}")
    if not suffix and (named in COMPRESSED or named == ".parquet"):
        kind = COMPRESSED.get(named, "parquet")
        raise DatasetError(
            f"{file}: cannot be read: is no {kind} file, it begins with {head[:20]!r}; download it again, or rename it"
        )


def _check_content(file: Path, head: bytes) -> None:
    """Raises DatasetError for the beginning of an empty file, or of one that holds no rows."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start:
        raise DatasetError(f"{file}: is empty and has no rows; download it again, or take it out")
    for mark, what in _OTHERS.items():
        if start.startswith(mark):
            raise DatasetError(f"{file}: {what}")
    if head[_TAR] == b"ustar":
        raise DatasetError(f"{file}: is a tar archive; unpack it and give a file of it")


def _unpacked(file: Path) -> bytes:
    pyarrow = _pyarrow(file)
    with pyarrow.input_stream(str(file), compression=COMPRESSED[file.suffix.lower()]) as stream:
        return bytes(stream.read())


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise DatasetError(f"{file}: {file.suffix[1:]} needs pyarrow; pip install -e '.[parquet]'") from None
    return pyarrow


def _read_table(file: Path, data: bytes | None) -> list[Row]:
    pyarrow = _pyarrow(file)
    with pyarrow.memory_map(str(file)) if data is None else pyarrow.BufferReader(data) as source:
        if kind_of(file) == ".parquet":
            from pyarrow import parquet

            table = parquet.read_table(source)
        else:
            from pyarrow import ipc

            is_file = source.read(len(b"ARROW1")) == b"ARROW1"
            source.seek(0)
            table = (ipc.open_file if is_file else ipc.open_stream)(source).read_all()
        rows: list[Row] = table.to_pylist()
    return rows


def _read_json(file: Path, text: str) -> list[Row]:
    """A JSON list of objects, or an object a line."""
    if re.match(r"\s*\[", text):
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _no_json(f"{file}", text, error) from None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise DatasetError(f"{file}: must be a JSON list of objects, or an object a line")
        return rows
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _whole(file, text) or _no_json(f"{file} line {number}", line, error) from None
        if not isinstance(row, dict):
            raise DatasetError(f"{file} line {number}: must be a JSON object, is {type(row).__name__}")
        rows.append(row)
    if len(rows) == 1 and (problem := _all_in_one(file, rows[0])):
        raise problem
    return rows


def _no_json(place: str, text: str, error: Exception) -> DatasetError:
    return DatasetError(f"{place}: is not JSON: {error}; it begins with {text.strip()[:60]!r}")


def _whole(file: Path, text: str) -> DatasetError | None:
    """The error for a file that is one object over several lines."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    what = f"is one JSON object ({', '.join(found):.100}); must be a list of objects, or an object a line"
    return _all_in_one(file, found) or DatasetError(f"{file}: {what}")


def _all_in_one(file: Path, found: Row) -> DatasetError | None:
    """The error for one object that holds all rows: by column or number, as pandas writes, or in lists of rows."""
    is_row = kind_of(file) == ".jsonl"  # then its lists and objects may be those of a row
    if _is_columns(list(found.values()), is_row):
        what = "is one object of columns, as pandas writes; write it by to_json(..., orient='records', lines=True)"
        return DatasetError(f"{file}: {what}")
    held = [name for name, value in found.items() if _is_rows(value)]
    if held and (list(found) == ["data"] or (not is_row and ("data" in held or len(held) == len(found)))):
        what = f"is one JSON object with its rows in {', '.join(held):.100}; write one file for each list of rows"
        return DatasetError(f"{file}: {what}")
    return None


def _is_columns(values: Sequence[Any], is_row: bool) -> bool:
    """Returns True for cells by number, and for lists of one length or objects of one shape unless they are a row's."""
    if values and all(isinstance(value, dict) for value in values):
        one_shape = len(values) > 1 and len({tuple(value) for value in values}) == 1
        return all("0" in value for value in values) or (one_shape and not is_row)
    plain = all(isinstance(value, list) and not any(isinstance(one, dict) for one in value) for value in values)
    return bool(values) and plain and not is_row and len({len(value) for value in values}) == 1


def _is_rows(value: Any) -> bool:
    """Returns True for a list of objects that are no messages of a conversation."""
    objects = isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)
    return objects and not {"role", "from"} & value[0].keys()


def _read_csv(file: Path, text: str, texts: Collection[str]) -> list[Row]:
    """Rows by the header's names. Empty cells are None; a column of numbers has numbers if that keeps every value,
    unless it is one of `texts`.
    """
    csv.field_size_limit(2**31 - 1)
    header = text[:_HEADER_CHARACTERS].lstrip("\r\n").partition("\n")[0]
    delimiter = "\t" if kind_of(file) == ".tsv" else max(",;\t", key=header.count)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        table = [(lines.line_num, cells) for cells in lines if any(cells)]
    except csv.Error as error:
        raise DatasetError(f"{file} line {lines.line_num}: is no csv: {error}") from None
    names = [name.strip() or f"Unnamed: {place}" for place, name in enumerate(table[0][1])]  # as pandas names its index
    if len(set(names)) < len(names):
        raise DatasetError(f"{file}: its first line must name each column once, is {header.strip():.200}")
    for number, cells in table:
        if len(cells) != len(names):
            what = f"has {len(cells)} cells, must have {len(names)}: {', '.join(names)}"
            raise DatasetError(f"{file} line {number}: {what}; put cells with {delimiter!r} into double quotes")
    cells_of = dict(zip(names, zip(*(cells for _, cells in table[1:]), strict=True), strict=False))
    columns = [[cell or None for cell in cells] if name in texts else _typed(cells) for name, cells in cells_of.items()]
    return [dict(zip(names, cells, strict=True)) for cells in zip(*columns, strict=True)]


def _typed(cells: Sequence[str]) -> list[Any]:
    given = [cell for cell in cells if cell]
    if all(re.fullmatch(r"-?(?:0|[1-9]\d{0,999})", cell, re.ASCII) for cell in given):
        return [int(cell) if cell else None for cell in cells]
    if all(_is_exact(cell) for cell in given):
        return [float(cell) if cell else None for cell in cells]
    return [cell or None for cell in cells]


def _is_exact(cell: str) -> bool:
    """Returns True for a finite number that a float holds: all its digits count, and none leads with 0."""
    if not re.fullmatch(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", cell, re.ASCII):
        return False
    try:
        return math.isfinite(float(cell)) and Decimal(cell) == Decimal(repr(float(cell)))
    except InvalidOperation:  # an exponent beyond Decimal's
        return False


_PART = re.compile(r"-(\d{5})-of-(\d{5})\b")  # as the datasets library numbers the files of a split, from 0


def files_of_split(folder: Path, split: str, subset: str | None) -> list[Path]:
    """Files of a folder's split, in order: of `save_to_disk`, of the card's `configs`, else by their names.

    By name, these are <split>{.,-}* of the first of <folder>/<subset>, <folder>, <folder>/data that has any, and else
    what the datasets library finds there. Raises DatasetError, also for <split>.jsonl beside others that are no parts.
    """
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _saved_files(folder, split)
    if _has_configs(folder) and (files := _library_files(folder, split, subset)):
        return _whole_split(files, split)
    others = [path.name for path in sorted(folder.iterdir()) if path.is_dir() and _split_files(path, split)]
    others = [name for name in others if name != "data"]
    if subset and others and subset not in others:
        raise DatasetError(f"folder {str(folder)!r} has no subset {subset!r}; subset_name may be {', '.join(others)}")
    places = [folder / subset] if subset and (folder / subset).is_dir() else []
    for place in [*places, folder, folder / "data"]:
        if files := _split_files(place, split):
            if len(kinds := sorted({kind_of(file) for file in files})) > 1:
                found = ", ".join(split + kind for kind in kinds)
                what = f"has {found}, which may be the same rows; give one file as path"
                raise DatasetError(f"folder {str(place)!r} {what}")
            unnumbered = [file for file in files if not _PART.search(file.name)]
            if len(unnumbered) > 1 and any(_is_plain(file, split) for file in unnumbered):
                found = ", ".join(file.name for file in unnumbered[:_SHOWN_NAMES])
                what = f"has {found}, of which one may be a part of another; give one file as path"
                raise DatasetError(f"folder {str(place)!r} {what}")
            return _whole_split(files, split)
    if not others and (files := _library_files(folder, split, subset)):
        return files
    names = [path.name for path in sorted(folder.iterdir())]
    held = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "") or "nothing"
    hint = f"subset_name may be {', '.join(others)}" if others else f"it holds {held}"
    raise DatasetError(f"folder {str(folder)!r} has no {split}.jsonl, {split}*.parquet or other {FORMS} file; {hint}")


def _split_files(place: Path, split: str) -> list[Path]:
    if not place.is_dir():
        return []
    named = (file for file in sorted(place.iterdir()) if file.name.startswith(split) and is_data(file))
    return [file for file in named if file.name[len(split)] in "-." and (file.is_file() or file.is_symlink())]


def _is_plain(file: Path, split: str) -> bool:
    """Returns True for <split>.jsonl and the like, also compressed."""
    return file.name.lower().startswith(f"{split}{kind_of(file)}".lower())


def _whole_split(files: list[Path], split: str) -> list[Path]:
    """The files of a split, if none is missing. Raises DatasetError for a link to nothing, and for a missing part."""
    if dangling := [file for file in files if not file.exists()]:
        raise DatasetError(f"{dangling[0]}: is a link to a file that is not there; download it again")
    parts = {(int(part[1]), int(part[2])) for file in files if (part := _PART.search(file.name))}
    for count in {count for _, count in parts}:
        if missing := sorted(set(range(count)) - {number for number, of in parts if of == count}):
            what = f"lacks {len(missing)} of the {count} files of {split}, the first is number {missing[0]:05}"
            folder = str(files[0].parent)
            raise DatasetError(f"folder {folder!r} {what}; download them again, or give one file as path")
    return files


def _has_configs(folder: Path) -> bool:
    """Returns True for a dataset card (README.md) whose front matter names files."""
    card = folder / "README.md"
    if not card.is_file():
        return False
    front = re.match(r"---\s*\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    return front is not None and "data_files:" in front[1]


def _saved_files(folder: Path, split: str) -> list[Path]:
    """The arrow files of a folder that `save_to_disk` wrote."""
    datasets = _datasets(folder)
    if datasets is None:
        raise DatasetError(
            f"{str(folder)!r} is of save_to_disk and needs the datasets library; pip install -e '.[hub]'"
        )
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library raises many types
        for file in sorted(folder.rglob("*.arrow")):
            with file.open("rb") as stream:
                _check_kind(file, stream.read(_HEAD_BYTES))
        raise DatasetError(f"{str(folder)!r} cannot be read as a folder of save_to_disk: {error}") from None
    if isinstance(found, dict):
        if split not in found:
            raise DatasetError(f"{str(folder)!r} has no split {split!r}; split may be {', '.join(found)}")
        found = found[split]
    elif split != "train":
        raise DatasetError(f"{str(folder)!r} is one Dataset, without the split {split!r}; leave split out to read it")
    return [Path(file["filename"]) for file in found.cache_files]


def _library_files(folder: Path, split: str, subset: str | None) -> list[Path]:
    """Files of a split by the rules of the datasets library, which the hub has too; empty if it finds none."""
    datasets = _datasets(folder)
    if datasets is None:
        return []
    try:
        found = datasets.load_dataset_builder(str(folder.resolve()), subset).config.data_files or {}
    except FileNotFoundError:
        return []
    except Exception as error:  # no such configuration; a card that is no YAML
        what = " ".join(str(error).split()).partition(" Example of usage")[0]
        raise DatasetError(f"folder {str(folder)!r}, subset_name {subset!r}: {what}") from None
    splits = {str(name): [Path(file) for file in files] for name, files in found.items()}
    usable = {name: files for name, files in splits.items() if files and all(map(is_data, files))}
    if usable and split not in usable:
        raise DatasetError(f"folder {str(folder)!r} has no split {split!r}; split may be {', '.join(usable)}")
    return usable.get(split, [])


def _datasets(folder: Path) -> Any:
    try:
        import datasets
    except ImportError:
        return None
    return datasets
