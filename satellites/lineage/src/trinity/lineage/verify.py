#!/usr/bin/env python3
"""Checks the folder of `trinity provenance`: tasks' rows -> groups -> ledger -> versions, checkpoint -> statement.

    python3 verify.py FOLDER [--key PUBLIC_KEY] [--data [TASKSET=]ROWS.jsonl] [--config CONFIG.json]

This file needs only Python and shares no code with Trinity. It exits with 1 and names the first file that is not what
the chain says. Without --key the statement's signature is not checked: whoever changed the folder may have written it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PAYLOAD_TYPE = "application/vnd.in-toto+json"
LISTED = ("checkpoint", "version", "versions", "ledger")  # a statement lists every file of these folders
P, L = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493  # of Ed25519
D = -121665 * pow(121666, P - 2, P) % P


class Broken(Exception):
    """A file is not what the chain says."""


def parts(message: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """Yields number, value and encoding of each field of a protobuf message."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        begin, key = at, varint()
        if key & 7 == 0:
            value: int | bytes = varint()
        else:
            size = {1: 8, 5: 4}.get(key & 7) or varint()
            value, at = message[at : at + size], at + size
            if len(value) != size:
                raise IndexError("cut off")
        yield key >> 3, value, message[begin:at]


def fields(message: bytes) -> dict[int, list]:
    found: dict[int, list] = {}
    for number, value, _ in parts(message):
        found.setdefault(number, []).append(value)
    return found


def only(found: dict[int, list], number: int, path: Path, default: Any = None) -> Any:
    """Returns a field's value. Raises Broken for several: protobuf takes the last one, or merges them."""
    values = found.get(number, [default])
    if len(values) > 1 or values[0] is None:
        raise Broken(f"{path} has field {number} {len(found.get(number, []))} times, must be once")
    return values[0]


def version_digest(manifest: bytes) -> str:
    """SHA-256 of a version's manifest without offers (field 6) and delta (9), as the next version names it."""
    return hashlib.sha256(b"".join(raw for number, _, raw in parts(manifest) if number not in (6, 9))).hexdigest()


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_statement(folder: Path, key: bytes | None) -> dict[str, Any]:
    """Checks the statement's signature and the files that it lists. Returns its predicate."""
    path = folder / "statement.dsse.json"
    if not path.exists():
        raise Broken(f"{folder} has no {path.name}: give a folder that `trinity provenance --job JOB` has written")

    def decode(text: str) -> bytes:
        data = base64.b64decode(text)
        if base64.b64encode(data).decode() != text:  # base64 has several forms of the same bytes
            raise Broken(f"{path} has {text[-9:]!r}, which no encoder writes")
        return data

    envelope = json.loads(path.read_bytes())
    kind, payload = envelope["payloadType"], decode(envelope["payload"])
    signatures = {one["keyid"]: decode(one["sig"]) for one in envelope["signatures"]}
    signed = b"DSSEv1 %d %b %d %b" % (len(kind), kind.encode(), len(payload), payload)
    name = hashlib.sha256(key or b"").hexdigest()
    if kind != PAYLOAD_TYPE:
        raise Broken(f"{path} has payloadType {kind!r}, must be {PAYLOAD_TYPE}")
    said = [{"keyid": one, "sig": base64.b64encode(sig).decode()} for one, sig in signatures.items()]
    if envelope != {"payloadType": kind, "payload": envelope["payload"], "signatures": said}:
        raise Broken(f"{path} has more than a payload and its signatures")
    if key is not None and not (name in signatures and is_signed(key, signed, signatures[name])):
        raise Broken(f"{path} is not signed by the given key")
    statement = json.loads(payload)
    check_files(folder, {one["name"]: one["digest"]["sha256"] for one in statement["subject"]})
    return dict(statement["predicate"])


def check_files(folder: Path, listed: dict[str, str]) -> None:
    """Compares the listed files. Raises Broken for others, and links: a loader might prefer them to listed files."""
    for name, digest in listed.items():
        path = folder / name
        if not path.is_file():
            raise Broken(f"{path} is missing, and the statement lists it")
        if (found := sha256(path)) != digest:
            raise Broken(f"{path} has SHA-256 {found}, the statement says {digest}")
    for path in (path for part in LISTED for path in (folder / part).rglob("*")):
        name, is_link = path.relative_to(folder).as_posix(), path.is_symlink()
        is_marker = name == "checkpoint/.full_checkpoint" and not is_link and not path.stat().st_size
        if (is_link or not path.is_dir()) and name not in listed and not is_marker:
            raise Broken(f"{path} is not in the statement; it was added later")


def check_ledger(folder: Path) -> tuple[list[str], dict[str, int]]:
    """Follows the chain of entries. Returns their digests, from step 0 without one, and the steps of groups."""
    entries = [""]
    groups: dict[str, int] = {}
    for step, path in enumerate(sorted((folder / "ledger").iterdir()), 1):
        entry = fields(path.read_bytes())
        number, before = only(entry, 2, path), only(entry, 17, path, b"").hex()
        if (number, path.name) != (step, f"{step:08d}.pb"):
            raise Broken(f"{path} is the entry of step {number}, must be that of step {step}")
        if before != entries[-1]:
            raise Broken(f"{path} says {before!r} of the entry before, whose SHA-256 is {entries[-1]!r}")
        entries.append(sha256(path))
        for group in map(fields, entry.get(3, [])):
            groups.setdefault(only(group, 16, path, b"").hex(), step)
    groups.pop("", None)  # of an older version
    return entries, groups


def check_versions(folder: Path, entries: list[str]) -> int:
    """Follows the versions back from the last step's: ledger entries, parents, sizes of files. Returns their number.

    Versions before the oldest one here are gone, so its parent is not compared.
    """
    newest = folder / "version/manifest.pb"
    paths = [newest] * newest.exists() + sorted((folder / "versions").glob("*.pb"), reverse=True)
    expected, named_by = "", newest
    for path in paths:
        manifest = path.read_bytes()
        found = fields(manifest)
        made, entry = only(found, 3, path, 0), only(found, 12, path, b"").hex()
        if path == newest and made != len(entries) - 1:
            raise Broken(f"{path} is the version of step {made}")
        if entry and [entry] != (known := entries[made : made + 1]):
            raise Broken(f"{path} names ledger entry {entry}, that of step {made} is {' '.join(known) or 'not here'}")
        if path != newest and version_digest(manifest) != expected:
            raise Broken(f"{path} has digest {version_digest(manifest)}, {named_by} says {expected or 'nothing'}")
        expected, named_by = only(found, 13, path, b"").hex(), path
        for file in map(fields, found.get(5, []) if path == newest else []):
            there = folder / "version" / only(file, 1, path).decode()
            if not there.is_file() or there.stat().st_size != only(file, 2, path):
                raise Broken(f"{there} is not as long as manifest.pb says")
    return len(paths)


def check_log(
    folder: Path, groups: dict[str, int], data: dict[str, list], whole_steps: Any = ()
) -> tuple[int, int, int]:
    """Compares every stored group with the ledger, and its task's row with the data: rows by taskset, or those of "".

    Every group of `whole_steps` must be here. Returns how many groups are here, how many are gone, and how many rows
    were compared.
    """
    here = sorted((folder / "log").glob("*"))  # an empty folder may be lost on the way
    gone = groups.keys() - {path.stem for path in here}
    if missing := sorted(digest for digest in gone if groups[digest] in whole_steps):
        raise Broken(f"{folder}/log/{missing[0]}.pb is missing, and the statement says that its step is whole")
    tasks = []
    for path in here:
        digest = sha256(path)
        if path.name != f"{digest}.pb" or digest not in groups:
            raise Broken(f"{path} is no group of the ledger: its SHA-256 is {digest}")
        outcome = fields(path.read_bytes())
        task = fields(only(fields(only(outcome, 1, path)), 1, path))
        if len(outcome) > 1:
            raise Broken(f"{path} has fields {', '.join(map(str, outcome))}, must be a group alone")
        pictures = json.loads(only(task, 9, path, b"{}")).get("image_key")
        digests = [hashlib.sha256(image).hexdigest() for image in task.get(22, [])]
        name, number, row = only(task, 5, path, b"").decode(), only(task, 7, path, 0), json.loads(only(task, 8, path))
        # The task has digests in place of images; messages with images, and unreadable images, cannot be compared.
        whole = pictures is None or row.pop(pictures, None) == digests
        tasks.append((path, name, number, row, whole))
    names = sorted({name for _, name, *_ in tasks})
    if "" in data and len(names) > 1:
        raise Broken(f"--data: there are tasks of {' and '.join(names)}; give --data NAME=FILE")
    compared = 0
    for path, name, number, row, whole in tasks:
        rows = data.get(name, data.get(""))
        if rows is None:
            continue
        if number >= len(rows) or any(column(rows[number], key) != row[key] for key in row):
            raise Broken(f"{path}: its task was made of another row {number} than the data has")
        compared += whole
    return len(here), len(gone), compared


def column(row: dict, name: str) -> Any:
    """Returns a value of a row: `a.b` is column `a.b`, or else `b` inside of column `a`."""
    if name in row or "." not in name:
        return row.get(name)
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def add(p: tuple, q: tuple) -> tuple:
    """Adds points of the curve of Ed25519 in extended coordinates (RFC 8032, 5.1.4)."""
    a, b = (p[1] - p[0]) * (q[1] - q[0]) % P, (p[1] + p[0]) * (q[1] + q[0]) % P
    c, d = 2 * p[3] * q[3] * D % P, 2 * p[2] * q[2] % P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % P, g * h % P, f * g % P, e * h % P


def times(factor: int, point: tuple) -> tuple:
    result = (0, 1, 1, 0)
    while factor:
        result = add(result, point) if factor & 1 else result
        point, factor = add(point, point), factor >> 1
    return result


def decoded(data: bytes) -> tuple:
    """Decodes a point (RFC 8032, 5.1.3). Raises Broken for bytes that are none."""
    y = int.from_bytes(data, "little") & (1 << 255) - 1
    square = (y * y - 1) * pow(D * y * y + 1, P - 2, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    x = P - x if x & 1 != data[31] >> 7 else x
    if y >= P or (x * x - square) % P or x == P:
        raise Broken("the key is no point of Ed25519")
    return x, y, 1, x * y % P


def is_signed(key: bytes, message: bytes, signature: bytes) -> bool:
    """Verifies an Ed25519 signature R, s: R is s * base - SHA-512(R, key, message) * key (RFC 8032, 5.1.7)."""
    s = int.from_bytes(signature[32:], "little")
    h = int.from_bytes(hashlib.sha512(signature[:32] + key + message).digest(), "little") % L
    base, (x, y, _, xy) = decoded((4 * pow(5, P - 2, P) % P).to_bytes(32, "little")), decoded(key)
    x, y, z, _ = add(times(s, base), times(h, (P - x, y, 1, P - xy)))
    x, y = x * pow(z, P - 2, P) % P, y * pow(z, P - 2, P) % P
    return len(signature) == 64 and s < L and (y | (x & 1) << 255).to_bytes(32, "little") == signature[:32]


def rows_of(text: str) -> list:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):  # a text may hold U+2028
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return rows


def key_of(text: str) -> bytes:
    if "PRIVATE KEY" in text:
        raise ValueError("is a private key; the public one is beside it, in a file whose name ends in .pub")
    key = bytes.fromhex(text)
    if len(key) != 32:
        raise ValueError(f"has {len(key)} bytes, must be 32 as 64 hexadecimal digits")
    return key


def config_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"is no JSON ({error}); give the config.json of the run's stage") from None


def main(arguments: list[str] | None = None) -> int:
    program = None if arguments is None else "trinity verify"  # None: the file's own name
    parser = argparse.ArgumentParser(program, description="Checks the folder of `trinity provenance`.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--key", help="public key: 64 hexadecimal digits")
    rows_help = "rows as JSON lines; NAME=FILE for one of several tasksets"
    parser.add_argument("--data", action="append", default=[], help=rows_help)
    parser.add_argument("--config", help="config.json of the run's stage")
    given = parser.parse_args(arguments)

    def read(option: str, file: str, parse: Callable[[str], Any]) -> Any:
        try:
            return parse(Path(file).read_text("utf-8-sig"))
        except (OSError, ValueError) as error:
            parser.error(f"--{option} {file}: cannot be read: {error}")

    key = read("key", given.key, key_of) if given.key is not None else None
    files = [("", "", text) if Path(text).exists() else text.rpartition("=") for text in given.data]
    data = {name: read("data", file, rows_of) for name, _, file in files}
    config = read("config", given.config, config_of) if given.config is not None else None
    try:
        said = check_statement(given.folder, key)
        entries, groups = check_ledger(given.folder)
        step, head = len(entries) - 1, entries[-1]
        state = json.loads((given.folder / "checkpoint/trainer_state.json").read_bytes())
        for who, one, other in (
            ("the statement", said["ledger"]["step"], said["ledger"]["sha256"]),
            ("checkpoint/trainer_state.json", state["step"], state["ledger_sha256"]),
        ):
            if (one, other) != (step, head):
                raise Broken(f"{who} names step {one}, entry {other}; the ledger ends at step {step}, entry {head}")
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
        if given.config is not None and digest != said["configuration"]["sha256"]:
            raise Broken(f"{given.config} is not the configuration that the statement names")
        here, gone, compared = check_log(given.folder, groups, data, said["log"]["whole_steps"])
        versions = check_versions(given.folder, entries)
    except Broken as error:
        print(f"BROKEN: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        print(f"BROKEN: {given.folder} is incomplete or damaged: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"whole: {step} steps, {here} groups ({gone} more only by their digests), ", end="")
    print(f"{versions} versions, checkpoint, statement", end="")
    print(f"; rows: {compared} compared, {here - compared} not comparable" if data else "", end="")
    print("" if key is not None else "; its signature was not checked (--key)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
