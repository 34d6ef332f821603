"""`trinity provenance` and verify.py: one flipped byte anywhere is found, and the file with it is named."""

import asyncio
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.fakes.data.experience import make_group, make_task
from support.fakes.pages.recorded_run import make_job
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.buffer.ledger.wire import Entry, digest_of, entry_to_proto
from trinity.buffer.log.wire import LogEntry
from trinity.config import dump, load
from trinity.data.experience import Task
from trinity.data.wire import encode_outcome
from trinity.lineage import provenance as command
from trinity.lineage import verify
from trinity.reading.client import Buffer
from trinity.reading.errors import RunError
from trinity.reading.reader import JobStage, find_job_stage
from trinity.reading.run_record import mark_folder
from trinity.runtime import files
from trinity.weights.checkpoint_manifest import ManifestWriter
from trinity.weights.manifest import FileInfo, FolderOffer, Manifest
from trinity.weights.wire import decode_manifest, encode_manifest
from trinity.weights.wire import digest_of as digest_of_version

pytestmark = pytest.mark.core

STEPS = 4


def chain() -> tuple[list[Entry], dict[int, list[bytes]]]:
    """Entries of STEPS steps with two groups each, and the groups' payloads."""
    entries: list[Entry] = []
    payloads: dict[int, list[bytes]] = {}
    for step in range(1, STEPS + 1):
        tasks = [make_task(2 * step + one, row_json=json.dumps({"question": f"q{2 * step + one}"})) for one in (0, 1)]
        payloads[step] = [encode_outcome(make_group(task)) for task in tasks]
        groups = [LogEntry.parse(data).unchecked_summary(2 * step + i) for i, data in enumerate(payloads[step])]
        previous = entries[-1].sha256 if entries else b""
        entry = Entry("r", step, "fifo", 1.7e9, groups=tuple(groups), cursor=b"", previous_sha256=previous)
        entries.append(replace(entry, sha256=digest_of(entry)))
    return entries, payloads


class Served(Buffer):
    """Answers as a buffer does; the log has released the groups of step 1."""

    skipped = 0
    lost = (0, 0)  # step, place in it

    def __init__(self, entries: list[Entry], payloads: dict[int, list[bytes]]) -> None:
        self.entries, self.payloads = entries, payloads

    async def _entry(self, step: int) -> pb.LedgerEntry:
        return entry_to_proto(replace(self.entries[step - 1], skip_reason="shown in answers only"))

    async def outcomes(self, step: int) -> Any:
        if step == 1:
            raise RunError("released")
        for place, one in enumerate(self.payloads[step] if step != self.skipped else ()):
            if (step, place) == self.lost:
                raise RunError("the group is gone")
            yield one


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobStage:
    job = make_job(tmp_path / "job")
    mark_folder(job)
    entries, payloads = chain()
    checkpoint = job / f"global_step_{STEPS}"
    (checkpoint / "actor").mkdir(parents=True)
    state = {"step": STEPS, "ledger_sha256": entries[-1].sha256.hex()}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    (job / f"weights/v{STEPS}").mkdir(parents=True)
    header = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    weights = len(header).to_bytes(8, "little") + header + bytes(range(16))
    (job / f"weights/v{STEPS}/part-00000.safetensors").write_bytes(weights)
    checksum = files.checksum(job / f"weights/v{STEPS}/part-00000.safetensors")
    parent = b""
    for version in range(STEPS - 2, STEPS + 1):  # those before are gone
        (job / f"weights/v{version}").mkdir(parents=True, exist_ok=True)
        manifest = Manifest(
            "r", version, version, (), (FileInfo("part-00000.safetensors", 79, checksum),), (FolderOffer("/x"),), 1.0,
            ledger_sha256=entries[version - 1].sha256, parent_sha256=parent or bytes(32),
        )  # fmt: skip
        (job / f"weights/v{version}/manifest.pb").write_bytes(encode_manifest(manifest))
        parent = digest_of_version(manifest)
    (checkpoint / "actor/model.safetensors").write_bytes(weights)
    ManifestWriter(checkpoint).write()
    (checkpoint / ".full_checkpoint").touch()
    served = SimpleNamespace(buffer=Served(entries, payloads))
    monkeypatch.setattr(command, "ask", lambda _, __, question: asyncio.run(question(served)))
    return find_job_stage(job=job)


def made(stage: JobStage, folder: Path) -> tuple[Path, Path]:
    """The folder, and the file of the public key."""
    text = command.provenance(stage, None, folder, folder.with_suffix(".pem"))
    assert f"{STEPS} steps, {2 * (STEPS - 1)} groups, signed" in text
    assert text.endswith(f"verify.py {folder} --key {folder.with_suffix('.pem.pub')}")
    return folder, folder.with_suffix(".pem.pub")


def check(folder: Path, *arguments: object) -> tuple[int, str]:
    """As a third party does: the file that lies in the folder, with nothing of Trinity."""
    command = [sys.executable, "-I", "-S", str(folder / "verify.py"), str(folder), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def files_of(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size)


def test_a_whole_folder_is_whole(stage: JobStage, tmp_path: Path) -> None:
    folder, key = made(stage, tmp_path / "out")
    code, text = check(folder, "--key", key)
    assert (code, text) == (
        0,
        "whole: 4 steps, 6 groups (2 more only by their digests), 3 versions, checkpoint, statement\n",
    )
    assert "its signature was not checked" in check(folder)[1]
    statement = json.loads((folder / "statement.dsse.json").read_text())
    assert statement["payloadType"] == "application/vnd.in-toto+json"
    with pytest.raises(RunError, match="exists; give another folder"):
        made(stage, tmp_path / "out")


@pytest.mark.parametrize("name", ["part-00000.safetensors", "manifest.pb"])
def test_a_damaged_version_is_not_signed(name: str, stage: JobStage, tmp_path: Path) -> None:
    path = stage.folder / f"weights/v{STEPS}/{name}"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match="the version is damaged"):
        made(stage, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("step", "refused"), [(2, False), (3, True), (4, True)])
def test_a_group_that_the_log_lost_is_not_taken_for_a_released_one(
    step: int, refused: bool, stage: JobStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the oldest groups can be released."""
    monkeypatch.setattr(Served, "lost", (step, 0))
    if refused:
        with pytest.raises(RunError, match=f"step {step}: the log has lost the group with SHA-256"):
            made(stage, tmp_path / "out")
    else:
        assert "4 steps, 4 groups, signed" in command.provenance(stage, None, tmp_path / "out", tmp_path / "key")


def test_a_skipped_step_has_no_groups(stage: JobStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Served, "skipped", 2)
    command.provenance(stage, None, tmp_path / "out")
    assert "4 steps, 4 groups (4 more only by their digests)" in check(tmp_path / "out")[1]


def test_one_flipped_byte_is_found_and_its_file_is_named(
    stage: JobStage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, key = made(stage, tmp_path / "out")
    kinds = set()
    for path in files_of(folder):
        if path.name == "verify.py":
            continue
        content, kind = path.read_bytes(), path.relative_to(folder).parts[0]
        kinds.add(kind)
        for place in {0, len(content) // 2, len(content) - 1}:
            changed = bytearray(content)
            changed[place] ^= 0x10
            path.unlink()  # a checkpoint's files are links
            path.write_bytes(changed)
            assert verify.main([str(folder), "--key", str(key)]) == 1, f"{path} at {place}"
            said = capsys.readouterr().err
            named = path if kind != "statement.dsse.json" else folder
            assert str(named) in said, f"{path} at {place}: {said}"
        path.write_bytes(content)
    assert kinds == {"ledger", "log", "checkpoint", "version", "versions", "statement.dsse.json"}
    assert verify.main([str(folder), "--key", str(key)]) == 0


@pytest.mark.parametrize(
    "gone",
    [
        "ledger/00000002.pb",
        f"ledger/{STEPS:08d}.pb",
        "log/*.pb",
        "checkpoint/actor/model.safetensors",
        "statement.dsse.json",
        "versions/00000003.pb",
    ],
)
def test_a_file_that_is_gone_is_named(gone: str, stage: JobStage, tmp_path: Path) -> None:
    folder, key = made(stage, tmp_path / "out")
    found = max(folder.glob(gone))
    found.unlink()
    code, text = check(folder, "--key", key)
    assert code == 1
    assert str(found.relative_to(folder)) in text


def test_files_that_were_lengthened_cut_or_exchanged_are_named(stage: JobStage, tmp_path: Path) -> None:
    folder, key = made(stage, tmp_path / "out")
    for part in ("ledger", "log", "checkpoint", "version", "versions"):
        found = list(files_of(folder / part))
        path, content = found[0], found[0].read_bytes()
        other = found[-1].read_bytes() if len(found) > 1 else b"of another run"
        for changed in (content + b"\x00", content[:-1], other):
            path.unlink()
            path.write_bytes(changed)
            code, text = check(folder, "--key", key)
            assert (code, str(path) in text) == (1, True), text
        path.write_bytes(content)
    assert check(folder, "--key", key)[0] == 0


@pytest.mark.parametrize(
    "added",
    [
        "checkpoint/actor/huggingface/model.safetensors",
        "checkpoint/actor/.full_checkpoint",
        "version/adapter_config.json",
        "versions/00000001.pb",
        f"ledger/{STEPS + 1:08d}.pb",
        "log/more",
    ],
)
def test_a_file_that_nobody_signed_is_named(added: str, stage: JobStage, tmp_path: Path) -> None:
    folder, key = made(stage, tmp_path / "out")
    (folder / added).parent.mkdir(exist_ok=True)
    shutil.copy(folder / "version/part-00000.safetensors", folder / added)
    code, text = check(folder, "--key", key)
    assert (code, re.search(f"{added} is (not in the statement|no group)", text) is None) == (1, False)


@pytest.mark.parametrize("added", ["checkpoint/actor/huggingface", "checkpoint/.full_checkpoint", "version"])
def test_a_link_that_nobody_signed_is_named(added: str, stage: JobStage, tmp_path: Path) -> None:
    if added == "version":  # a statement without a version
        shutil.rmtree(stage.folder / "weights")
    folder, key = made(stage, tmp_path / "out")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "manifest.pb").write_bytes(b"")
    if added.endswith("checkpoint"):
        with (folder / added).open("wb") as marker:
            marker.write(b"x")
        assert "is not in the statement" in check(folder, "--key", key)[1]
    (folder / added).unlink(missing_ok=True)
    (folder / added).symlink_to(elsewhere)
    code, text = check(folder, "--key", key)
    assert (code, added in text and "is not in the statement" in text) == (1, True)


@pytest.mark.parametrize(
    ("changed", "named", "said"),
    [
        ({"version": STEPS - 1, "base_model": "x"}, "versions/00000003.pb", r"has digest .*version/manifest.pb says"),
        ({"version": STEPS - 2, "base_model": "x"}, "versions/00000002.pb", r"has digest .*00000003.pb says"),
        (
            {"version": STEPS, "ledger_sha256": bytes(32)},
            "version/manifest.pb",
            r"names ledger entry 0000.*not that of step 4",
        ),
        (
            {"version": STEPS, "files": (FileInfo("part-00000.safetensors", 80, "x"),)},
            "version/part-00000.safetensors",
            "long",
        ),
        ({"version": STEPS, "step": STEPS - 1}, "version/manifest.pb", "is the version of step 3"),
    ],
)
def test_a_version_of_another_line_is_named_though_the_statement_lists_it(
    stage: JobStage, tmp_path: Path, changed: dict[str, Any], named: str, said: str
) -> None:
    """Without a key a statement can be written anew; the chain of versions still has to fit."""
    folder, _ = made(stage, tmp_path / "out")
    version = changed.pop("version")
    path = folder / ("version/manifest.pb" if version == STEPS else f"versions/{version:08d}.pb")
    manifest = replace(decode_manifest(path.read_bytes()), **changed)
    path.unlink()
    path.write_bytes(encode_manifest(manifest))
    head = json.loads((folder / "checkpoint/trainer_state.json").read_text())["ledger_sha256"]
    command._sign(command._statement(stage, STEPS, head, [], folder), folder, None)
    code, text = check(folder)
    assert code == 1
    assert named in text
    assert re.search(said, text), text


@pytest.mark.parametrize("step", [STEPS - 1, STEPS + 1, 10**12])
def test_the_last_step_is_the_ledger_s(step: int, stage: JobStage, tmp_path: Path) -> None:
    """Whatever a statement without a key says, and though it lists a checkpoint of another step."""
    folder, _ = made(stage, tmp_path / "out")
    state = folder / "checkpoint/trainer_state.json"
    known = json.loads(state.read_text())
    for named, said in (("the statement", step), ("trainer_state.json", STEPS)):
        state.unlink()
        state.write_text(json.dumps({**known, "step": step}))
        statement = command._statement(stage, said, known["ledger_sha256"], [], folder)
        command._sign(statement, folder, None)
        code, text = check(folder)
        assert (code, f"{named} names step {step}, " in text, f"ends at step {STEPS}, " in text) == (1, True, True)


def test_versions_of_an_older_trainer_name_nothing(stage: JobStage, tmp_path: Path) -> None:
    for path in stage.folder.glob("weights/v*/manifest.pb"):
        older = replace(decode_manifest(path.read_bytes()), ledger_sha256=b"", parent_sha256=b"")
        path.write_bytes(encode_manifest(older))
    folder, key = made(stage, tmp_path / "out")
    assert not list((folder / "versions").iterdir())
    assert check(folder, "--key", key)[0] == 0


def test_one_flipped_bit_of_the_envelope_is_found(
    stage: JobStage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in the name of the key, and where base64 has several forms of the same bytes."""
    folder, key = made(stage, tmp_path / "out")
    path = folder / "statement.dsse.json"
    content = path.read_bytes()
    payload = content.index(b'"payload": ')
    end = content.index(b'"', payload + len(b'"payload": "'))
    for place in [*range(payload), *range(end - 4, len(content))]:  # the payload's end, and what is around it
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            try:
                same = json.loads(changed) == json.loads(content)  # one space for another
            except ValueError:
                same = False
            if not same:
                assert verify.main([str(folder), "--key", str(key)]) == 1, f"byte {place}, bit {bit}"
                assert "BROKEN" in capsys.readouterr().err


def test_other_content_of_the_envelope_is_found(stage: JobStage, tmp_path: Path) -> None:
    folder, key = made(stage, tmp_path / "out")
    path = folder / "statement.dsse.json"
    envelope = json.loads(path.read_bytes())
    signature = envelope["signatures"][0]
    for more in (
        {"note": "x"},
        {"signatures": [{**signature, "note": "x"}]},
        {"signatures": [signature, signature]},
    ):
        path.write_text(json.dumps({**envelope, **more}))
        assert "a payload and its signatures" in check(folder, "--key", key)[1], more


def test_the_configuration_is_the_run_s(stage: JobStage, tmp_path: Path) -> None:
    folder, key = made(stage, tmp_path / "out")
    given = tmp_path / "config.json"
    given.write_bytes((stage.folder / "config.json").read_bytes())
    shown = dump(load(given))
    given.write_text(json.dumps(shown, indent=1))
    assert check(folder, "--key", key, "--config", given)[0] == 0
    given.write_text(json.dumps({**shown, "name": "other"}))
    assert f"{given} is not the configuration" in check(folder, "--config", given)[1]
    given.write_text("{")
    assert check(folder, "--config", given)[0] == 2


def test_an_added_group_and_another_key_are_refused(stage: JobStage, tmp_path: Path) -> None:
    folder, key = made(stage, tmp_path / "out")
    _, wrong = made(stage, tmp_path / "other")
    assert "is not signed by the given key" in check(folder, "--key", wrong)[1]
    shutil.copy(min((folder / "log").iterdir()), folder / f"log/{'0' * 64}.pb")
    assert "is no group of the ledger" in check(folder, "--key", key)[1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has 0 bytes, must be 32"),
        ("ab" * 33, "has 33 bytes"),
        ("no key", "cannot be read"),
        ("-----BEGIN PRIVATE KEY-----", "give the public key, 64 hexadecimal digits in the file that ends in .pub"),
        (None, "No such file"),
    ],
)
def test_a_key_of_another_length_is_named(content: str | None, said: str, stage: JobStage, tmp_path: Path) -> None:
    folder, _ = made(stage, tmp_path / "out")
    key = tmp_path / "public"
    if content is not None:
        key.write_text(content)
    code, text = check(folder, "--key", key)
    assert (code, f"--key {key}: " in text, said in text) == (2, True, True)


@pytest.mark.parametrize("key", ["01" + "00" * 30 + "80", "ed" + "ff" * 30 + "7f", "02" + "00" * 31])
def test_a_key_that_is_no_point_has_signed_nothing(key: str) -> None:
    """Refuses other encodings of a point, and bytes off the curve: some of these keys accept forged signatures."""
    with pytest.raises(verify.Broken, match="the key is no point of Ed25519"):
        verify.is_signed(bytes.fromhex(key), b"", bytes(64))


def test_the_usage_names_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        verify.main([str(tmp_path), "--key", str(tmp_path / "gone")])
    assert capsys.readouterr().err.startswith("usage: trinity verify ")


def test_rows_of_the_tasks_are_those_of_the_data(stage: JobStage, tmp_path: Path) -> None:
    folder, key = made(stage, tmp_path / "out")
    code, text = check(folder, "--config", __file__)
    assert (code, re.search(r"cannot be read: .*; give the\s+config.json of the run's stage", text) is None) == (
        2,
        False,
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"q{row}"}) + "\n" for row in range(20)))
    assert check(folder, "--key", key, "--data", rows)[0] == 0
    rows.write_text(rows.read_text().replace("q7", "q8"))
    code, text = check(folder, "--data", rows)
    assert (code, "another row 7" in text) == (1, True)


def test_rows_are_lines_and_nothing_else(stage: JobStage, tmp_path: Path) -> None:
    """Lines end with a newline: a text may hold other separators. Blank lines and a byte order mark are no rows."""
    folder, key = made(stage, tmp_path / "out")
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"question": f"q{row}", "other": "a\u2028b\x85c"}, ensure_ascii=False) for row in range(20)]
    rows.write_text("\ufeff" + "\n\n".join(lines) + "\n", encoding="utf-8")
    assert "; rows: 6 compared, 0 not comparable" in check(folder, "--key", key, "--data", rows)[1]
    for file, said in ((tmp_path / "gone", "No such file"), (tmp_path / "bad", "line 2: Expecting value")):
        (tmp_path / "bad").write_text("{}\nx\n")
        code, text = check(folder, "--data", file)
        assert (code, f"--data {file}: cannot be read" in text, said in text) == (2, True, True)


def log_of(folder: Path, *tasks: Task) -> dict[str, int]:
    """Stores groups of tasks in a folder. Returns the digests."""
    payloads = [encode_outcome(make_group(task)) for task in tasks]
    groups = {hashlib.sha256(payload).hexdigest(): 1 for payload in payloads}
    (folder / "log").mkdir()
    for digest, payload in zip(groups, payloads, strict=True):
        (folder / f"log/{digest}.pb").write_bytes(payload)
    return groups


def test_rows_of_several_tasksets_are_compared_by_name(tmp_path: Path) -> None:
    first = make_task(1, taskset="one", row=0, row_json='{"q": 1}')
    groups = log_of(tmp_path, first, replace(first, ordinal=2, taskset="two", row_json='{"q": 2}'))
    with pytest.raises(verify.Broken, match=r"another row 0 of two than .* give --data two=FILE"):
        verify.check_log(tmp_path, groups, {"": [{"q": 1}]})
    assert verify.check_log(tmp_path, groups, {"two": [{"q": 2}]}) == (2, 0, 1)
    assert verify.check_log(tmp_path / "without a log", groups, {}) == (0, 2, 0)  # stores keep no empty folders
    assert verify.check_log(tmp_path, groups, {"one": [{"q": 1}], "two": [{"q": 2}]}) == (2, 0, 2)
    with pytest.raises(verify.Broken, match="another row 0"):
        verify.check_log(tmp_path, groups, {"two": [{"q": 1}]})
    with pytest.raises(verify.Broken, match="--data to=FILE: no group is of a task of to, but of one, two"):
        verify.check_log(tmp_path, groups, {"to": [{"q": 2}]})


def test_images_and_nested_columns_are_compared(tmp_path: Path) -> None:
    image = b"picture"
    row = {"a": {"b": 1}, "a.b": 1, "image": [hashlib.sha256(image).hexdigest()]}
    form = json.dumps({"image_key": "image"})
    task = make_task(1, row=0, row_json=json.dumps(row), format_json=form, images=(image,))
    unreadable = json.dumps({**row, "image": {"problem": "gone"}})
    groups = log_of(tmp_path, task, replace(task, ordinal=2, row_json=unreadable, images=()))
    assert verify.check_log(tmp_path, groups, {"": [{"a": {"b": 1}, "image": "x.png"}]}) == (2, 0, 1)
    with pytest.raises(verify.Broken, match="another row 0"):
        verify.check_log(tmp_path, groups, {"": [{"a": {"b": 2}, "image": "x.png"}]})


def field(number: int, value: int | bytes) -> bytes:
    """A field as protobuf encodes it; numbers and lengths fit into two bytes."""

    def varint(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value & 127 | 128, value >> 7])

    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (field(1, b""), "has field 1 2 times"),
        (field(2, b""), "has fields 1, 2, must be a group alone"),
        (field(1, field(1, b"")), "has field 1 2 times"),
        (None, "has field 1 0 times"),
    ],
)
def test_fields_that_protobuf_would_merge_are_refused(
    extra: bytes | None, said: str, stage: JobStage, tmp_path: Path
) -> None:
    payload = b"" if extra is None else encode_outcome(make_group(make_task(1))) + extra
    with pytest.raises(verify.Broken, match=said):
        check_group(tmp_path, payload)


@pytest.mark.parametrize("number", [1, 5, 7, 8])
def test_a_field_of_group_or_task_that_occurs_twice_is_refused(number: int, tmp_path: Path) -> None:
    task = field(5, b"t") + field(7, 3) + field(8, b"{}")
    twice = task + {5: field(5, b"u"), 7: field(7, 4), 8: field(8, b"{}")}.get(number, b"")
    group = field(1, twice) + (field(1, task) if number == 1 else b"")
    assert check_group(tmp_path / "once", field(1, field(1, task)))
    with pytest.raises(verify.Broken, match=f"has field {number} 2 times"):
        check_group(tmp_path / "twice", field(1, group))


def check_group(folder: Path, payload: bytes) -> object:
    digest = hashlib.sha256(payload).hexdigest()
    (folder / "log").mkdir(parents=True)
    (folder / f"log/{digest}.pb").write_bytes(payload)
    return verify.check_log(folder, {digest: 1}, {})


def test_signatures_of_rfc_8032() -> None:
    """Test vectors 1 and 3 of section 7.1."""
    vectors = [
        ("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a", "",
         "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bb"
         "e24655141438e7a100b"),
        ("fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025", "af82",
         "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed"
         "28dc027beceea1ec40a"),
    ]  # fmt: skip
    for key, message, signature in vectors:
        given = bytes.fromhex(key), bytes.fromhex(message), bytes.fromhex(signature)
        assert verify.is_signed(*given)
        assert not verify.is_signed(given[0], given[1] + b"x", given[2])
        assert not verify.is_signed(given[0], given[1], given[2][:-1] + b"\x00")


def test_a_run_of_another_version_is_refused(stage: JobStage, tmp_path: Path) -> None:
    (stage.job / "version.json").write_text('{"version": "0.1.7"}')
    with pytest.raises(RunError, match=r"was begun with Trinity 0\.1\.7"):
        made(stage, tmp_path / "out")


def test_a_checkpoint_that_names_no_entry_is_refused(stage: JobStage, tmp_path: Path) -> None:
    checkpoint = stage.folder / f"global_step_{STEPS}"
    (checkpoint / "trainer_state.json").write_text(json.dumps({"step": STEPS}))
    ManifestWriter(checkpoint, ["trainer_state.json"]).write()
    with pytest.raises(RunError, match="names no entry of the ledger"):
        made(stage, tmp_path / "out")
    with pytest.raises(RunError, match="no checkpoint of this step; the run keeps 4"):
        command.provenance(stage, 3)
    assert not (tmp_path / "out").exists()
