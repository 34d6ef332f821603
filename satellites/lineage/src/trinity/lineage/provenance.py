"""`trinity provenance`: a checkpoint's lineage as a folder that a third party checks, and `trinity verify`.

<out>/ledger/<step>.pb      content of every entry up to the step; each names the digest of the one before
<out>/log/<sha256>.pb       groups of these steps, as far as the log holds them
<out>/checkpoint/           the checkpoint (hard links): its state names the digest of the step's entry
<out>/version/              the weight version of the step, if its files are there
<out>/statement.dsse.json   in-toto statement v1 in a DSSE envelope, signed with Ed25519
<out>/verify.py             checks all of this with Python alone
"""

import base64
import hashlib
import itertools
import json
import math
import shlex
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from trinity.commands import command, group
from trinity.config import dump
from trinity.config.parents import FORK
from trinity.lineage import verify as verifier
from trinity.lineage.fork import link
from trinity.reading.errors import RunError
from trinity.reading.reader import JobStage, Reader, any_buffer, ask, find_job_stage
from trinity.reading.render import near
from trinity.reading.run_record import check_folder, this_version
from trinity.runtime import files
from trinity.runtime.errors import InvalidInput
from trinity.weights.checkpoint_manifest import MANIFEST
from trinity.weights.checkpoint_manifest import verify as verify_checkpoint
from trinity.weights.checkpoints import COMPLETE, checkpoint_folder, complete_steps
from trinity.weights.manifest import check_files
from trinity.weights.wire import decode_manifest

app, verify_app = group(), group()

# https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
_STATEMENT = "https://in-toto.io/Statement/v1"
_VERSION, _PARENT = 2, 13  # fields of sync.v1.Manifest
_GROUPS, _SEQUENCE, _OUTCOME = 3, 1, 16  # fields of buffer.v1.LedgerEntry, and of its groups
_PREDICATE = "https://github.com/trinity/provenance/v1"


@command(app, "provenance", find_job_stage)
def provenance(
    job_stage: JobStage,
    at: Annotated[int | None, typer.Option("--at", min=1, help="Step of the checkpoint; else the newest")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="New folder; else <stage>/provenance/step_<n>")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="Private key (PEM, Ed25519); made if it is missing")] = None,
) -> str:
    """Write a checkpoint's lineage as a folder that others can check, with a signed statement."""
    check_folder(job_stage.job)  # the statement names this version as the run's
    kept = complete_steps(job_stage.folder)
    step = max(kept, default=0) if at is None else at
    if step not in kept:
        there = f"the run keeps {', '.join(map(str, kept))}" if kept else "the run keeps none"
        raise RunError(f"--at {step}: there is no checkpoint of this step; {there}", 2)
    checkpoint, folder = checkpoint_folder(job_stage.folder, step), out or job_stage.folder / f"provenance/step_{step}"
    if folder.exists():
        raise RunError(f"--out: {folder} exists; give another folder", 2)
    verify_checkpoint(checkpoint)
    making = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(making, ignore_errors=True)
    try:
        (making / "ledger").mkdir(parents=True)
        (making / "log").mkdir()
        head, groups, whole = ask(any_buffer, job_stage, lambda reader: _write_ledger(reader, step, making))
        said = (files.read_json(checkpoint / "trainer_state.json") or {}).get("ledger_sha256", "")
        if said != head:
            why = f"names ledger entry {said}, and the ledger has {head}" if said else "names no entry of the ledger"
            raise RunError(f"{checkpoint} {why}: an older version wrote it, or the ledger is another; nothing was made")
        shutil.copytree(checkpoint, making / "checkpoint", copy_function=link)
        version, end = job_stage.folder / f"weights/v{step}", ""
        if (version / "manifest.pb").exists():
            _check_version(version)
            shutil.copytree(version, making / "version", copy_function=link)
            end = _write_versions(job_stage.folder / "weights", making)
        public = _sign(_statement(job_stage, step, head, whole, making), making, key)
        shutil.copy2(verifier.__file__, making / "verify.py")
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    signed = f"signed; public key: {public}" if public else "not signed: give --key FILE"
    by = shlex.join(["python3", near(folder / "verify.py"), near(folder), *(["--key", str(public)] if public else [])])
    return f"{near(folder)}: {step} steps, {groups} groups, {signed}{end}\ncheck it by: {by}"


@command(verify_app, "verify")
def verify(
    folder: Annotated[Path, typer.Argument(help="A folder of `trinity provenance`")],
    key: Annotated[Path | None, typer.Option("--key", help="Public key of the statement")] = None,
    data: Annotated[list[str] | None, typer.Option("--data", help="Rows as JSON lines, or TASKSET=FILE")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="config.json of the run's stage")] = None,
) -> int:
    """Check a checkpoint's lineage, from the rows of its tasks to its files."""
    given = [
        str(folder),
        *(["--key", str(key)] if key else []),
        *(["--config", str(config)] if config else []),
        *(part for one in data or [] for part in ("--data", one)),
    ]
    return verifier.main(given)


async def _write_ledger(reader: Reader, step: int, folder: Path) -> tuple[str, int, list[int]]:
    """Writes entries and stored groups.

    Returns the digest of the last entry, how many groups the log still has, and the steps of which it has all groups.
    """
    digest, groups, named = "", 0, {}
    missing: list[tuple[int, int, str]] = []  # of each step the first: place in the log, step, digest
    oldest_here = math.inf
    for number in range(1, step + 1):
        content, digest = await reader.buffer.entry_content(number)
        if hashlib.sha256(content).hexdigest() != digest:
            raise RunError(f"step {number}: the ledger's entry has another digest than the buffer says")
        (folder / f"ledger/{number:08d}.pb").write_bytes(content)
        members = [
            (int(member.get(_SEQUENCE, [0])[0]), member.get(_OUTCOME, [b""])[0].hex())
            for member in map(verifier.fields, verifier.fields(content).get(_GROUPS, []))
        ]
        named[number] = {outcome for _, outcome in members}
        unread = iter(members)
        try:
            async for outcome in reader.buffer.outcomes(number):
                (folder / f"log/{hashlib.sha256(outcome).hexdigest()}.pb").write_bytes(outcome)
                oldest_here = min(oldest_here, next(unread)[0])
                groups += 1
        except RunError:  # the log has released this group and all before it, or has lost it
            missing.extend((place, number, sha256) for place, sha256 in itertools.islice(unread, 1))
    for place, number, sha256 in missing:
        if place > oldest_here:
            raise RunError(
                f"step {number}: the log has lost the group with SHA-256 {sha256}, its message {place}, and holds "
                "older ones: the files of NATS are damaged; nothing was made"
            )
    stored = {path.stem for path in (folder / "log").iterdir()}
    return digest, groups, [number for number, digests in named.items() if digests <= stored]


def _check_version(folder: Path) -> None:
    """Raises RunError unless a version's files are those of its manifest."""
    try:
        manifest = decode_manifest((folder / "manifest.pb").read_bytes())
        check_files(manifest, folder)
    except (OSError, InvalidInput) as error:
        raise RunError(f"{folder}: the version is damaged: {error}; nothing was made") from None


def _write_versions(weights: Path, folder: Path) -> str:
    """Writes the manifests of the versions from which the step's one comes, as far back as the run has them.

    Returns a note if they end above an older version that the run still has.
    """
    known, oldest = {}, math.inf
    for path in weights.glob("v*/manifest.pb"):
        content = path.read_bytes()
        try:
            known[verifier.version_digest(content)] = content
        except LookupError:
            raise RunError(f"{path} is damaged; nothing was made") from None
        oldest = min(oldest, int(path.parent.name[1:]))
    (folder / "versions").mkdir()
    content = (folder / "version/manifest.pb").read_bytes()
    while older := known.pop(_first(content, _PARENT).hex(), b""):
        content = older
        (folder / f"versions/{_first(content, _VERSION):08d}.pb").write_bytes(content)
    last = _first(content, _VERSION)
    return f"\nversions end at {last}: none here is its parent, though v{oldest} is" if last > oldest else ""


def _first(manifest: bytes, field: int) -> Any:
    return verifier.fields(manifest).get(field, [b"" if field == _PARENT else 0])[0]


def _statement(job_stage: JobStage, step: int, head: str, whole: list[int], folder: Path) -> dict[str, Any]:
    names = {path.relative_to(folder).as_posix() for part in verifier.LISTED for path in (folder / part).rglob("*")}
    found = sorted(name for name in names if (folder / name).is_file() and name != f"checkpoint/{COMPLETE}")
    subject = [{"name": name, "digest": {"sha256": verifier.sha256(folder / name)}} for name in found]
    config = json.dumps(dump(job_stage.config), sort_keys=True).encode()
    source = job_stage.config.buffer.explorer_input
    tasksets = [source.taskset] if source.taskset else source.tasksets
    return {
        "_type": _STATEMENT,
        "subject": subject,
        "predicateType": _PREDICATE,
        "predicate": {
            "run": job_stage.run,
            "name": job_stage.name,
            "trinity": this_version(),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "ledger": {"step": step, "sha256": head},
            "log": {"whole_steps": whole},
            "configuration": {"sha256": hashlib.sha256(config).hexdigest()},
            "model": job_stage.config.model.model_path,
            "data": [{"name": one.name, "path": one.path, **_digest_of(one.path)} for one in tasksets],
            "graders": sorted({source.reward_of(one) for one in tasksets} - {""}),
            "parent": files.read_json(job_stage.folder / FORK),
            "manifest": {"sha256": verifier.sha256(folder / "checkpoint" / MANIFEST)},
        },
    }


def _digest_of(path: str) -> dict[str, Any]:
    """Returns the digests of a dataset's files; nothing for one of the hub."""
    place = Path(path).expanduser()
    if place.is_file():
        return {"sha256": verifier.sha256(place)}
    found = sorted(one for one in place.rglob("*") if one.is_file()) if place.is_dir() else []
    return {"files": {one.relative_to(place).as_posix(): verifier.sha256(one) for one in found}} if found else {}


def _sign(statement: dict[str, Any], folder: Path, key: Path | None) -> Path | None:
    """Writes the statement in its envelope (DSSE 1.0). Returns the file of the public key; None without a key."""
    payload = json.dumps(statement, sort_keys=True).encode()
    kind = verifier.PAYLOAD_TYPE
    signatures, public = [], None
    if key is not None:
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        private = _private_key(key)
        raw = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        signature = private.sign(b"DSSEv1 %d %b %d %b" % (len(kind), kind.encode(), len(payload), payload))
        signatures = [{"keyid": hashlib.sha256(raw).hexdigest(), "sig": base64.b64encode(signature).decode()}]
        public = key.with_name(f"{key.name}.pub")
        files.write_atomic(public, raw.hex().encode())
    envelope = {"payloadType": kind, "payload": base64.b64encode(payload).decode(), "signatures": signatures}
    files.write_json(folder / "statement.dsse.json", envelope)
    return public


def _private_key(path: Path) -> Any:
    """Reads a private key, or makes it. Raises RunError for another kind of key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )

    if not path.exists():
        made = Ed25519PrivateKey.generate()
        files.write_atomic(path, made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), mode=0o600)
        return made
    try:
        found = load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise RunError(f"--key: {path} is no private key in PEM without password: {error}", 2) from None
    if not isinstance(found, Ed25519PrivateKey):
        raise RunError(f"--key: {path} is no Ed25519 key; `openssl genpkey -algorithm ed25519` makes one", 2)
    return found
