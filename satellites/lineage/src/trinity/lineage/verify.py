#!/usr/bin/env python3
"""Checks the folder of `trinity provenance`: tasks' rows -> groups -> ledger -> versions, checkpoint -> statement.

    python3 verify.py FOLDER [--key PUBLIC_KEY] [--data [TASKSET=]ROWS.jsonl] [--config CONFIG.json]

This file needs only Python and shares no code with Trinity. It exits with 1 and names the first file that is not what
the chain says. Without --key the statement's signature is not checked: whoever changed the folder may have written it.
"""

import argparse
import base64
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

P, L = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493  # of Ed25519
D = -121665 * pow(121666, P - 2, P) % P
PAYLOAD_TYPE = "application/vnd.in-toto+json"


class Broken(Exception):
    """A file is not what the chain says."""


def fields(data: bytes) -> "dict[int, list]":
    """Parses a protobuf message: numbers and bytes by field."""
    found: dict[int, list] = {}
    for number, value, _ in parts(data):
        found.setdefault(number, []).append(value)
    return found


def parts(data: bytes) -> "Iterator[tuple[int, int | bytes, bytes]]":
    """Yields number, value and encoding of each field of a protobuf message."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        begin, key = at, varint()
        if key & 7 == 0:
            value: int | bytes = varint()
        else:
            size = {1: 8, 5: 4}.get(key & 7) or varint()
            value, at = data[at : at + size], at + size
            if len(value) != size:
                raise IndexError("cut off")
        yield key >> 3, value, data[begin:at]


def only(found: "dict[int, list]", number: int, path: Path, default: "int | bytes | None" = None) -> Any:
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


def check_ledger(folder: Path, last: int, head: str) -> "tuple[dict[str, int], dict[int, str]]":
    """Follows the chain of entries back from the last one.

    Returns the digests of all groups with their step, and the digests of all entries by step.
    """
    groups: dict[str, int] = {}
    entries = {}
    expected = head
    for step in range(last, 0, -1):
        path = folder / f"ledger/{step:08d}.pb"
        if (found := sha256(path)) != expected:
            raise Broken(f"{path} has SHA-256 {found}, what follows it says {expected}")
        entries[step] = found
        entry = fields(path.read_bytes())
        if (number := only(entry, 2, path)) != step:
            raise Broken(f"{path} is the entry of step {number}")
        for member in map(fields, entry.get(3, [])):
            groups.setdefault(only(member, 16, path, b"").hex(), step)
        expected = only(entry, 17, path, b"").hex()
    if expected:
        raise Broken(f"{folder / 'ledger'} lacks what comes before step 1")
    groups.pop("", None)  # of an older version
    return groups, entries


def check_versions(folder: Path, step: int, entries: "dict[int, str]") -> int:
    """Follows the versions back from the step's one: ledger entries, parents, sizes of files. Returns their number.

    Versions before the oldest one here are gone, so its parent is not compared.
    """
    earlier = sorted((folder / "versions").glob("*.pb"), reverse=True)
    newest = folder / "version/manifest.pb"
    expected, named_by = "", newest
    for path in [newest, *earlier] if newest.exists() else earlier:
        data = path.read_bytes()
        found = fields(data)
        made, entry = only(found, 3, path, 0), only(found, 12, path, b"").hex()
        if path == newest and made != step:
            raise Broken(f"{path} is the version of step {made}")
        if entry and entry != entries.get(made):
            raise Broken(f"{path} names ledger entry {entry}, that of step {made} is {entries.get(made)}")
        if path != newest and version_digest(data) != expected:
            raise Broken(f"{path} has digest {version_digest(data)}, {named_by} says {expected or 'nothing'}")
        expected, named_by = only(found, 13, path, b"").hex(), path
        for file in map(fields, found.get(5, []) if path == newest else []):
            there = folder / "version" / only(file, 1, path).decode()
            if not there.is_file() or there.stat().st_size != only(file, 2, path):
                raise Broken(f"{there} is not as long as manifest.pb says")
    return len(earlier) + newest.exists()


def check_log(
    folder: Path,
    groups: "dict[str, int]",
    data: "dict[str, list]",
    whole_steps: "frozenset[int]" = frozenset(),
) -> "tuple[int, int, int]":
    """Compares every stored group with the ledger, and its task's row with the data: rows by taskset, or those of "".

    Every group of `whole_steps` must be here. Returns how many groups are here, how many are gone, and how many rows
    were compared.
    """
    here = sorted((folder / "log").glob("*"))  # an empty folder may be lost on the way
    stored = {path.name for path in here}
    for digest, step in groups.items():
        if step in whole_steps and f"{digest}.pb" not in stored:
            raise Broken(
                f"{folder}/log/{digest}.pb is missing, and the statement says that groups of step {step} are here"
            )
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
        name, number, text = only(task, 5, path, b"").decode(), only(task, 7, path, 0), only(task, 8, path)
        tasks.append((path, name, number, text, pictures, digests))
    names = sorted({name for _, name, *_ in tasks})
    if "" in data and len(names) > 1:
        raise Broken(f"--data: there are tasks of {' and '.join(names)}; give --data NAME=FILE")
    compared = 0
    for path, name, number, text, pictures, digests in tasks:
        rows, row = data.get(name, data.get("")), json.loads(text)
        if rows is None:
            continue
        if number >= len(rows) or any(column(rows[number], key) != row[key] for key in row if key != pictures):
            raise Broken(f"{path}: its task was made of another row {number} than the data has")
        # The task has digests in place of images; messages with images, and unreadable images, cannot be compared.
        compared += pictures is None or row.get(pictures) == digests
    return len(here), len(groups) - len(here), compared


def column(row: dict, name: str) -> Any:
    """Returns a value of a row: `a.b` is column `a.b`, or else `b` inside of column `a`."""
    if name in row or "." not in name:
        return row.get(name)
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def read_rows(path: Path) -> list:
    """Reads JSON lines. Raises OSError, or ValueError naming the line."""
    rows = []
    for number, line in enumerate(path.read_text("utf-8-sig").split("\n"), 1):  # a text may hold U+2028
        try:
            if line.strip():
                rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return rows


def check_files(folder: Path, listed: "dict[str, str]", what: str) -> None:
    for name, digest in listed.items():
        path = folder / name
        if not path.is_file():
            raise Broken(f"{path} is missing, and {what} lists it")
        if sha256(path) != digest:
            raise Broken(f"{path} has SHA-256 {sha256(path)}, {what} says {digest}")


def check_nothing_added(folder: Path, listed: "set[str]") -> None:
    """Raises Broken for a file or link that is not listed: a loader might prefer it to a listed file."""
    marker = folder / "checkpoint/.full_checkpoint"  # empty, so the statement leaves it out
    for part in ("checkpoint", "version", "versions", "ledger"):
        for root, folders, names in os.walk(folder / part):
            links = [name for name in folders if Path(root, name).is_symlink()]
            for path in (Path(root, name) for name in [*names, *links]):
                is_marker = path == marker and not path.is_symlink() and not path.stat().st_size
                if path.relative_to(folder).as_posix() not in listed and not is_marker:
                    raise Broken(f"{path} is not in the statement; it was added later")


def check_safetensors(path: Path) -> None:
    """Checks that the header describes exactly the file's bytes."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
    if 8 + size + max(ends, default=0) != path.stat().st_size:
        raise Broken(f"{path} is no whole safetensors file")


def check_checkpoint(folder: Path, step: int, head: str) -> None:
    checkpoint = folder / "checkpoint"
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())["files"]
    for name, one in manifest.items():  # its checksums are BLAKE3, which Python lacks; the statement has SHA-256
        if not (checkpoint / name).is_file() or (checkpoint / name).stat().st_size != one["size"]:
            raise Broken(f"{checkpoint / name} is not as long as manifest.json says")
    state = json.loads((checkpoint / "trainer_state.json").read_bytes())
    if (state["step"], state["ledger_sha256"]) != (step, head):
        said = f"step {state['step']}, digest {state['ledger_sha256']}"
        raise Broken(f"{checkpoint / 'trainer_state.json'} says {said}; the ledger ends at step {step}, digest {head}")
    for path in [*checkpoint.rglob("*.safetensors"), *(folder / "version").rglob("*.safetensors")]:
        check_safetensors(path)


def add(p: "tuple", q: "tuple") -> "tuple":
    """Adds points of the curve of Ed25519 in extended coordinates (RFC 8032, 5.1.4)."""
    a, b = (p[1] - p[0]) * (q[1] - q[0]) % P, (p[1] + p[0]) * (q[1] + q[0]) % P
    c, d = 2 * p[3] * q[3] * D % P, 2 * p[2] * q[2] % P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % P, g * h % P, f * g % P, e * h % P


def times(factor: int, point: "tuple") -> "tuple":
    result = (0, 1, 1, 0)
    while factor:
        result = add(result, point) if factor & 1 else result
        point, factor = add(point, point), factor >> 1
    return result


def decoded(data: bytes) -> "tuple":
    """Decodes a point (RFC 8032, 5.1.3). Raises Broken for bytes that are none."""
    y = int.from_bytes(data, "little")
    sign, y = y >> 255, y & (1 << 255) - 1
    square = (y * y - 1) * pow(D * y * y + 1, P - 2, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    if y >= P or (x * x - square) % P or (x == 0 and sign):
        raise Broken("the key or the signature is no point of Ed25519")
    x = P - x if x & 1 != sign else x
    return x, y, 1, x * y % P


def is_signed(key: bytes, message: bytes, signature: bytes) -> bool:
    """Verifies an Ed25519 signature (RFC 8032, 5.1.7)."""
    r, s = signature[:32], int.from_bytes(signature[32:], "little")
    base = decoded((4 * pow(5, P - 2, P) % P).to_bytes(32, "little"))
    h = int.from_bytes(hashlib.sha512(r + key + message).digest(), "little") % L
    one, other = times(s, base), add(decoded(r), times(h, decoded(key)))
    same = (one[0] * other[2] - other[0] * one[2]) % P == 0 and (one[1] * other[2] - other[1] * one[2]) % P == 0
    return len(signature) == 64 and s < L and same


def check_statement(folder: Path, key: "bytes | None") -> "dict[str, Any]":
    """Checks the signature, and that the folder has the files that the statement lists and no others.

    Returns its predicate.
    """
    path = folder / "statement.dsse.json"
    if not path.exists():
        raise Broken(f"{folder} has no {path.name}: give a folder that `trinity provenance --job JOB` has written")
    envelope = json.loads(path.read_bytes())
    payload = base64.b64decode(envelope["payload"], validate=True)
    signed = b"DSSEv1 %d %b %d %b" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)
    signatures = {one["keyid"]: base64.b64decode(one["sig"], validate=True) for one in envelope["signatures"]}
    name = hashlib.sha256(key or b"").hexdigest()
    if key is not None and (name not in signatures or not is_signed(key, signed, signatures[name])):
        raise Broken(f"{path} is not signed by the given key")
    listed = [{"keyid": one, "sig": base64.b64encode(sig).decode()} for one, sig in signatures.items()]
    again = {"payloadType": PAYLOAD_TYPE, "payload": base64.b64encode(payload).decode(), "signatures": listed}
    if envelope != again:  # base64 has several forms of the same bytes
        raise Broken(f"{path} is no envelope of one {PAYLOAD_TYPE}")
    statement = json.loads(payload)
    files = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
    check_files(folder, files, "the statement")
    last = int(statement["predicate"]["ledger"]["step"])
    check_nothing_added(folder, {*files, *(f"ledger/{step:08d}.pb" for step in range(1, last + 1))})
    return dict(statement["predicate"])


def main(arguments: "list[str] | None" = None) -> int:
    program = None if arguments is None else "trinity verify"  # None: the file's own name
    parser = argparse.ArgumentParser(program, description="Checks the folder of `trinity provenance`.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--key", type=Path, help="public key: 64 hexadecimal digits")
    parser.add_argument(
        "--data", action="append", default=[], help="rows as JSON lines; NAME=FILE for one of several tasksets"
    )
    parser.add_argument("--config", type=Path, help="config.json of the run's stage")
    given = parser.parse_args(arguments)
    key, data = None, {}
    if given.key is not None:
        try:
            key = bytes.fromhex(given.key.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"--key {given.key}: cannot be read: {error}")
        if len(key) != 32:
            parser.error(f"--key {given.key}: has {len(key)} bytes, must be 32 as 64 hexadecimal digits")
    for text in given.data:
        name, _, file = ("", "", text) if Path(text).exists() else text.rpartition("=")
        try:
            data[name] = read_rows(Path(file))
        except (OSError, ValueError) as error:
            parser.error(f"--data {text}: cannot be read: {error}")
    if given.config is not None:
        try:
            config = json.dumps(json.loads(given.config.read_bytes()), sort_keys=True).encode()
        except (OSError, ValueError) as error:
            parser.error(f"--config {given.config}: cannot be read: {error}")
    try:
        said = check_statement(given.folder, key)
        step, head = int(said["ledger"]["step"]), str(said["ledger"]["sha256"])
        if given.config is not None and hashlib.sha256(config).hexdigest() != said["configuration"]["sha256"]:
            raise Broken(f"{given.config} is not the configuration that the statement names")
        groups, entries = check_ledger(given.folder, step, head)
        here, gone, compared = check_log(given.folder, groups, data, frozenset(said["log"]["whole_steps"]))
        versions = check_versions(given.folder, step, entries)
        check_checkpoint(given.folder, step, head)
    except Broken as error:
        print(f"BROKEN: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        print(f"BROKEN: {given.folder} is incomplete or damaged: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"whole: {step} steps, {here} groups ({gone} more only by their digests), {versions} versions, ", end="")
    print("checkpoint, statement", end="")
    print(f"; rows: {compared} compared, {here - compared} not comparable" if data else "", end="")
    print("" if key else "; its signature was not checked (--key)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
