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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAYLOAD_TYPE = "application/vnd.in-toto+json"
LISTED = ("checkpoint", "version", "versions", "ledger")  # a statement lists every file of these folders
P, L = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493  # of Ed25519
D = -121665 * pow(121666, P - 2, P) % P


class Broken(Exception):
    """A file is not what the chain says."""


def require(fact: object, problem: str) -> None:
    if not fact:
        raise Broken(problem)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def varint(message: bytes, at: int) -> tuple[int, int]:
    """Returns the number that begins at `at`, and where it ends."""
    last = next((i for i in range(at, len(message)) if message[i] < 128), len(message))
    return sum((message[i] & 127) << 7 * (i - at) for i in range(at, last + 1)), last + 1


def parts(message: bytes) -> Iterator[tuple[int, Any, bytes]]:
    """Yields number, value and encoding of each field of a protobuf message."""
    at = 0
    while at < len(message):
        begin, (key, at) = at, varint(message, at)
        size, at = ({1: 8, 5: 4}[key & 7], at) if key & 7 in (1, 5) else varint(message, at)
        end = at + size if key & 7 else at  # 0: the number itself, without bytes
        if end > len(message):
            raise IndexError("cut off")
        yield key >> 3, message[at:end] if key & 7 else size, message[begin:end]
        at = end


def fields(message: bytes) -> dict[int, list]:
    found: dict[int, list] = {}
    for number, value, _ in parts(message):
        found.setdefault(number, []).append(value)
    return found


def only(found: dict[int, list], number: int, path: Path, default: Any = None) -> Any:
    """Returns a field's value. Raises Broken for several: protobuf takes the last one, or merges them."""
    values = found.get(number, [] if default is None else [default])
    require(len(values) == 1, f"{path} has field {number} {len(values)} times, must be once")
    return values[0]


def version_digest(manifest: bytes) -> str:
    """SHA-256 of a version's manifest without offers (field 6) and delta (9), as the next version names it."""
    return hashlib.sha256(b"".join(raw for number, _, raw in parts(manifest) if number not in (6, 9))).hexdigest()


def check_statement(folder: Path, key: bytes | None) -> dict[str, Any]:
    """Checks the statement's form, its signature and the files that it lists. Returns its predicate."""
    path = folder / "statement.dsse.json"
    require(path.exists(), f"{folder} has no {path.name}: give a folder of `trinity provenance --job JOB`")
    envelope = json.loads(path.read_bytes())
    payload = base64.b64decode(envelope["payload"])
    signatures = {one["keyid"]: base64.b64decode(one["sig"]) for one in envelope["signatures"]}
    written = {  # encoders write one of the base64 forms of the same bytes
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(payload).decode(),
        "signatures": [{"keyid": name, "sig": base64.b64encode(sig).decode()} for name, sig in signatures.items()],
    }
    require(envelope == written, f"{path} has more or other than {PAYLOAD_TYPE}, a payload and its signatures")
    if key is not None:
        signed = b"DSSEv1 %d %b %d %b" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)
        signature = signatures.get(hashlib.sha256(key).hexdigest(), b"")
        require(is_signed(key, signed, signature), f"{path} is not signed by the given key")
    statement = json.loads(payload)
    check_files(folder, {one["name"]: one["digest"]["sha256"] for one in statement["subject"]})
    return dict(statement["predicate"])


def check_files(folder: Path, listed: dict[str, str]) -> None:
    """Compares the listed files. Raises Broken for others, and links: a loader might prefer them to listed files."""
    for name, digest in listed.items():
        path = folder / name
        require(path.is_file(), f"{path} is missing, and the statement lists it")
        require(sha256(path) == digest, f"{path} has another SHA-256 than the statement says: {digest}")
    for path in (path for part in LISTED for path in (folder / part).rglob("*")):
        name, is_link = path.relative_to(folder).as_posix(), path.is_symlink()
        is_marker = name == "checkpoint/.full_checkpoint" and not is_link and not path.stat().st_size
        known = name in listed or is_marker or (path.is_dir() and not is_link)
        require(known, f"{path} is not in the statement; it was added later")


def check_ledger(folder: Path) -> tuple[list[str], dict[str, int]]:
    """Follows the chain of entries. Returns their digests, from step 0 without one, and the steps of groups."""
    entries = [""]
    groups: dict[str, int] = {}
    for step, path in enumerate(sorted((folder / "ledger").iterdir()), 1):
        entry = fields(path.read_bytes())
        number, before = only(entry, 2, path), only(entry, 17, path, b"").hex()
        is_next = (number, path.name) == (step, f"{step:08d}.pb")
        require(is_next, f"{path} is the entry of step {number}, must be that of step {step}")
        require(before == entries[-1], f"{path} says {before!r} of the entry before, with SHA-256 {entries[-1]!r}")
        entries.append(sha256(path))
        for group in map(fields, entry.get(3, [])):
            groups.setdefault(only(group, 16, path, b"").hex(), step)
    groups.pop("", None)  # of an older version
    return entries, groups


def check_versions(folder: Path, entries: list[str]) -> int:
    """Follows the versions back from the last step's: ledger entries, parents, sizes of files. Returns their number.

    Versions before the oldest one here are gone, so its parent is not compared.
    """
    newest, last = folder / "version/manifest.pb", len(entries) - 1
    paths = [newest] * newest.exists() + sorted((folder / "versions").glob("*.pb"), reverse=True)
    expected, named_by = "", newest
    for path in paths:
        manifest = path.read_bytes()
        found, digest = fields(manifest), version_digest(manifest)
        made, entry = only(found, 3, path, 0), only(found, 12, path, b"").hex()
        require(path != newest or made == last, f"{path} is the version of step {made}, must be that of step {last}")
        is_known = not entry or entries[made : made + 1] == [entry]
        require(is_known, f"{path} names ledger entry {entry}, which is not that of step {made}")
        require(path == newest or digest == expected, f"{path} has digest {digest}, {named_by} says {expected!r}")
        expected, named_by = only(found, 13, path, b"").hex(), path
        for file in map(fields, found.get(5, []) if path == newest else []):
            there, size = folder / "version" / only(file, 1, path).decode(), only(file, 2, path)
            require(there.is_file() and there.stat().st_size == size, f"{there} is not as long as {path} says: {size}")
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
    for digest in sorted(gone):
        missing = f"{folder}/log/{digest}.pb is missing, and the statement says that its step is whole"
        require(groups[digest] not in whole_steps, missing)
    compared, tasksets = 0, set()
    for path in here:
        digest = sha256(path)
        known = path.name == f"{digest}.pb" and digest in groups
        require(known, f"{path} is no group of the ledger: its SHA-256 is {digest}")
        outcome = fields(path.read_bytes())
        task = fields(only(fields(only(outcome, 1, path)), 1, path))
        require(len(outcome) == 1, f"{path} has fields {', '.join(map(str, outcome))}, must be a group alone")
        name, number, row = only(task, 5, path, b"").decode(), only(task, 7, path, 0), json.loads(only(task, 8, path))
        tasksets.add(name)
        rows = data.get(name, data.get(""))
        if rows is None:
            continue
        # The task has digests in place of images; messages with images, and unreadable images, cannot be compared.
        pictures = json.loads(only(task, 9, path, b"{}")).get("image_key")
        images = [hashlib.sha256(image).hexdigest() for image in task.get(22, [])]
        compared += pictures is None or row.pop(pictures, None) == images
        same = number < len(rows) and all(column(rows[number], key) == row[key] for key in row)
        other = f"{path}: its task has another row {number} of {name} than --data"
        require(same, f"{other}; with several tasksets give --data {name}=FILE")
    for name in sorted(data.keys() - tasksets - {""}) if here else ():
        raise Broken(f"--data {name}=FILE: no group is of a task of {name}, but of {', '.join(sorted(tasksets))}")
    return len(here), len(gone), compared


def column(row: dict, name: str) -> Any:
    """Returns a value of a row: `a.b` is column `a.b`, or else `b` inside of column `a`."""
    if name in row or "." not in name:
        return row.get(name)
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def add(p: tuple[int, int], q: tuple[int, int]) -> tuple[int, int]:
    """Adds points x, y of the curve of Ed25519, -x^2 + y^2 = 1 + D x^2 y^2."""
    (a, b), (c, d) = p, q
    e = D * a * b * c * d % P
    inverse = pow(1 - e * e, -1, P)
    return (a * d + b * c) * (1 - e) * inverse % P, (b * d + a * c) * (1 + e) * inverse % P


def times(factor: int, point: tuple[int, int]) -> tuple[int, int]:
    result = (0, 1)
    while factor:
        result = add(result, point) if factor & 1 else result
        point, factor = add(point, point), factor >> 1
    return result


def decoded(data: bytes) -> tuple[int, int]:
    """Decodes a point (RFC 8032, 5.1.3): y, and in the last bit which of two x. Raises Broken for other bytes."""
    y = int.from_bytes(data, "little") & (1 << 255) - 1
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    x = P - x if x & 1 != data[31] >> 7 else x
    require(y < P and x < P and (x * x - square) % P == 0, "the key is no point of Ed25519; give the signer's key")
    return x, y


def is_signed(key: bytes, message: bytes, signature: bytes) -> bool:
    """Verifies an Ed25519 signature R, s: R is s * base - SHA-512(R, key, message) * key (RFC 8032, 5.1.7)."""
    s = int.from_bytes(signature[32:], "little")
    if len(signature) != 64 or s >= L:
        return False
    h = int.from_bytes(hashlib.sha512(signature[:32] + key + message).digest(), "little") % L
    base, (x, y) = decoded((4 * pow(5, -1, P) % P).to_bytes(32, "little")), decoded(key)
    x, y = add(times(s, base), times(h, (P - x, y)))
    return (y | (x & 1) << 255).to_bytes(32, "little") == signature[:32]


def rows_of(text: str) -> list:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):  # a text may hold U+2028
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return rows


def key_of(text: str) -> bytes:
    key = bytes.fromhex(text)
    if len(key) != 32:
        raise ValueError(f"has {len(key)} bytes, must be 32")
    return key


def main(arguments: list[str] | None = None) -> int:
    program = None if arguments is None else "trinity verify"  # None: the file's own name
    parser = argparse.ArgumentParser(program, description="Checks the folder of `trinity provenance`.")
    helps = {
        "key": "the public key, 64 hexadecimal digits in the file that ends in .pub",
        "data": "rows as JSON lines; NAME=FILE for one of several tasksets",
        "config": "the config.json of the run's stage",
    }
    parser.add_argument("folder", type=Path)
    parser.add_argument("--key", help=helps["key"])
    parser.add_argument("--data", action="append", default=[], help=helps["data"])
    parser.add_argument("--config", help=helps["config"])
    given = parser.parse_args(arguments)

    def read(option: str, file: str, parse: Any) -> Any:
        try:
            return parse(Path(file).read_text("utf-8-sig"))
        except (OSError, ValueError) as error:
            parser.error(f"--{option} {file}: cannot be read: {error}; give {helps[option]}")

    key = read("key", given.key, key_of) if given.key is not None else None
    files = [("", "", text) if Path(text).exists() else text.rpartition("=") for text in given.data]
    data = {name: read("data", file, rows_of) for name, _, file in files}
    config = read("config", given.config, json.loads) if given.config is not None else None
    try:
        said = check_statement(given.folder, key)
        entries, groups = check_ledger(given.folder)
        step, head = len(entries) - 1, entries[-1]
        state = json.loads((given.folder / "checkpoint/trainer_state.json").read_bytes())
        for who, one, other in (
            ("the statement", said["ledger"]["step"], said["ledger"]["sha256"]),
            ("checkpoint/trainer_state.json", state["step"], state["ledger_sha256"]),
        ):
            ends = f"the ledger ends at step {step}, entry {head}"
            require((one, other) == (step, head), f"{who} names step {one}, entry {other}; {ends}")
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
        same = given.config is None or digest == said["configuration"]["sha256"]
        require(same, f"{given.config} is not the configuration that the statement names")
        here, gone, compared = check_log(given.folder, groups, data, said["log"]["whole_steps"])
        versions = check_versions(given.folder, entries)
    except Broken as error:
        print(f"BROKEN: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        print(f"BROKEN: {given.folder} is incomplete or damaged: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    rows = f"; rows: {compared} compared, {here - compared} not comparable" if data else ""
    unsigned = "" if key is not None else "; its signature was not checked (--key)"
    print(f"whole: {step} steps, {here} groups ({gone} more only by their digests), ", end="")
    print(f"{versions} versions, checkpoint, statement{rows}{unsigned}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
