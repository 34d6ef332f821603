"""Of a checkpoint only files that its trainer wrote are loaded: every other difference is named."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from trinity.runtime.errors import InvalidInput
from trinity.weights.checkpoint_manifest import MANIFEST, ManifestWriter, has_manifest, verify, verify_model
from trinity.weights.checkpoints import COMPLETE

pytestmark = pytest.mark.core

SHARD, MODEL = "actor/deepspeed/rank_0.pt", "actor/huggingface/model.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "global_step_3"
    for name, content in ((SHARD, b"shard"), (MODEL, b"weights" * 300_000), ("trainer_state.json", b"{}")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    ManifestWriter(folder).write()
    (folder / COMPLETE).touch()
    return folder


def test_what_was_written_is_loaded(checkpoint: Path) -> None:
    verify(checkpoint)
    verify_model(checkpoint / "actor/huggingface")
    verify(checkpoint, [SHARD])
    assert set(json.loads((checkpoint / MANIFEST).read_text())["files"]) == {SHARD, MODEL, "trainer_state.json"}


def changed(folder: Path) -> None:
    (folder / SHARD).write_bytes(b"other")


def longer(folder: Path) -> None:
    (folder / SHARD).write_bytes(b"shard and more")


def removed(folder: Path) -> None:
    (folder / SHARD).unlink()


def added(folder: Path) -> None:
    (folder / "actor/deepspeed/rank_1.pt").write_bytes(b"x")


def linked(folder: Path) -> None:
    (folder / "actor/deepspeed/more").symlink_to(folder / "actor/huggingface")


def nowhere(folder: Path) -> None:
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(folder / "not there")


def in_a_circle(folder: Path) -> None:
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(folder / SHARD)


def replaced_by_a_pipe(folder: Path) -> None:
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (nowhere, "rank_0.pt: is no file, and manifest.json lists it"),
        (in_a_circle, "rank_0.pt: is no file, and manifest.json lists it"),
        (replaced_by_a_pipe, "rank_0.pt: is no file, and manifest.json lists it"),
        (changed, r"rank_0.pt: has BLAKE3 [0-9a-f]{64}, manifest.json says [0-9a-f]{64}"),
        (longer, r"rank_0.pt: has 14 bytes, manifest.json says 5"),
        (removed, r"rank_0.pt: is missing, and manifest.json lists it"),
        (added, r"rank_1.pt: is not in manifest.json: the trainer did not write it"),
        (linked, r"deepspeed/more: is not in manifest.json"),
    ],
)
def test_every_difference_is_named_with_its_fix(change: Callable[[Path], None], said: str, checkpoint: Path) -> None:
    change(checkpoint)
    with pytest.raises(InvalidInput, match=said) as caught:
        verify(checkpoint, ["actor/deepspeed"])
    assert "allow_unverified_checkpoint: true (of trinity convert: --allow-unverified) loads them" in str(caught.value)
    with pytest.raises(InvalidInput):
        verify(checkpoint)
    verify_model(checkpoint / "actor/huggingface")  # which did not change


def test_without_a_manifest_nothing_is_loaded(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()
    assert not has_manifest(checkpoint)
    with pytest.raises(
        InvalidInput, match=r"has no manifest.json: an older version than 0.3 wrote it, or another program"
    ):
        verify(checkpoint)


@pytest.mark.parametrize("text", ["", "[]", '{"files": 3}', '{"files": {"a": 1}}', '{"files": {"a": {"size": "1"}}}'])
def test_a_manifest_that_no_trainer_writes_is_refused(text: str, checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_text(text)
    with pytest.raises(InvalidInput, match="does not list files with size and blake3 or sha256"):
        verify(checkpoint)


def entries(checkpoint: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads((checkpoint / MANIFEST).read_text())["files"]
    return found


def write_as_before(checkpoint: Path) -> None:
    """As former versions did."""
    names = (SHARD, MODEL, "trainer_state.json")
    contents = {name: (checkpoint / name).read_bytes() for name in names}
    listed = {name: {"size": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in contents.items()}
    (checkpoint / MANIFEST).write_text(json.dumps({"files": listed}))


def test_checksums_of_former_versions_stay_valid(checkpoint: Path) -> None:
    write_as_before(checkpoint)
    verify(checkpoint)
    changed(checkpoint)
    with pytest.raises(InvalidInput, match="has SHA-256"):
        verify(checkpoint)


def test_new_checksums_are_of_blake3_also_beside_former_ones(checkpoint: Path) -> None:
    content = (checkpoint / MODEL).read_bytes()
    assert entries(checkpoint)[MODEL] == {"size": len(content), "blake3": blake3(content).hexdigest()}
    write_as_before(checkpoint)
    (checkpoint / MODEL).write_bytes(b"converted")
    ManifestWriter(checkpoint, [MODEL]).write()
    kinds = {name: sorted(entry) for name, entry in entries(checkpoint).items()}
    assert (kinds[MODEL], kinds[SHARD]) == (["blake3", "size"], ["sha256", "size"])
    verify(checkpoint)


def test_a_converted_model_is_added(checkpoint: Path) -> None:
    (checkpoint / "actor/huggingface/config.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"config.json: is not in manifest.json"):
        verify_model(checkpoint / "actor/huggingface")
    ManifestWriter(checkpoint, ["actor/huggingface/config.json"]).write()
    verify(checkpoint)
