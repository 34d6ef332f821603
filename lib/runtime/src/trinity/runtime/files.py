"""Files that are whole or not there: write aside, sync, rename."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

_BLOCK = 1024 * 1024  # stays in the processor's cache: twice as fast as some MiB
_MOST_DIGITS = 300  # of an integer that a float can hold


def write_atomic(path: Path, content: bytes, *, durable: bool = True, mode: int = 0o644) -> None:
    """Replace `path` by `content`; after a crash it holds the old or the new bytes, never a mixture.

    With `durable` False only after a crash of the process, not of the machine: to sync one file can mean to wait for
    all that was written to the disk before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    write_atomic(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode(), mode=mode)


def end_last_line(path: Path) -> None:
    """End the line that a crash cut off, so that the next one appended is whole. Without a file: nothing."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as lines:
            lines.seek(-1, os.SEEK_END)
            if lines.read() != b"\n":
                lines.write(b"\n")


def keep_newest_lines(path: Path, most_bytes: int | None) -> None:
    """Remove the older half of a file of lines that has more than `most_bytes`; None: no limit.

    A process that has the file open reads on in the old one.
    """
    if most_bytes is None or not path.exists() or path.stat().st_size <= most_bytes:
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as newer, path.open("rb") as whole:
            whole.seek(-(most_bytes // 2), os.SEEK_END)
            whole.readline()
            shutil.copyfileobj(whole, newer)
        shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def start_of(path: Path) -> str:
    """Returns a clause that says where a relative path starts; empty for an absolute one."""
    return "" if path.is_absolute() else f"; relative paths start in {Path.cwd()}"


def read_json(path: Path) -> Any | None:
    """The parsed file, or None if there is none or it is not JSON."""
    try:
        return _parsed(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None


def json_lines(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """Yields the objects among JSON lines; skips lines that a crash cut off, and other values."""
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            value = _parsed(line)
            if isinstance(value, dict):
                yield value


def _integer(text: str) -> int:
    """Raises ValueError if the integer overflows a float."""
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


_DECODER = json.JSONDecoder(parse_int=_integer)


def _parsed(content: str | bytes) -> Any:
    text = content.decode(json.detect_encoding(content), "surrogatepass") if isinstance(content, bytes) else content
    return _DECODER.decode(text)


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes when the file is replaced or rewritten, also behind the links that Kubernetes mounts, and when it gets
    other rights, perhaps those to read it. None without it."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ctime_ns, stat.st_ino, stat.st_size


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder durable."""
    sync_file(folder)


def sync_file(path: Path) -> None:
    """fsync one file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """fsync every file and folder below `folder`."""
    for root, _, names in os.walk(folder):
        for name in names:
            sync_file(Path(root, name))
        sync_folder(Path(root))


def checksum(path: Path) -> str:
    """xxh3-128 of a file's content, in lower-case hexadecimal."""
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()
