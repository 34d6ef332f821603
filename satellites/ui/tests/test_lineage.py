"""Pages on where runs and weights come from: the tree of forks and regrades, and a version's provenance."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from support.fakes.pages.recorded_run import ledger, make_job, serve_ledger
from trinity.config.parents import Parent, Regrade, parent_of
from trinity.reading.errors import RunError
from trinity.runtime import names
from trinity.ui import lineage
from trinity.ui.places import Places
from trinity.weights.manifest import FileInfo, Manifest
from trinity.weights.wire import digest_of, encode_manifest

pytestmark = pytest.mark.core


def job(root: Path, name: str, parent: str = "", step: int = 2, regrade: Regrade | None = None) -> Path:
    folder = make_job(root / name)
    (folder / "version.json").write_text('{"version": "0.3.0"}')
    if parent:
        run = names.run_id("tests", parent)
        about = Parent(str(root / parent), run, f"tests/{parent}", "", step, (f"x={name}",), regrade=regrade)
        (folder / "fork.json").write_text(json.dumps(asdict(about)))
    return folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    return tmp_path


def shape(root: Path) -> list[tuple[int, str, str]]:
    found = asyncio.run(lineage.tree(Places(None, root)))
    return [(depth, node.title, node.key) for depth, node in found["rows"]]


def test_the_tree_has_forks_below_their_parents_and_parents_that_are_gone(root: Path) -> None:
    job(root, "first")
    job(root, "second", "first")
    job(root, "third", "second", regrade=Regrade(5, "other"))
    job(root, "orphan", "gone")
    job(root, "alone")
    rows = shape(root)
    assert set(rows) == {
        (0, "tests/first", "first"), (1, "tests/second", "second"), (2, "tests/third", "third"),
        (0, "tests/gone", ""), (1, "tests/orphan", "orphan"), (0, "tests/alone", "alone"),
    }  # fmt: skip
    titles = [title for _, title, _ in rows]
    assert titles.index("tests/first") + 1 == titles.index("tests/second") == titles.index("tests/third") - 1
    assert titles.index("tests/gone") + 1 == titles.index("tests/orphan")


def test_a_damaged_record_is_a_problem_of_the_page(root: Path) -> None:
    job(root, "first")
    (job(root, "second", "first") / "fork.json").write_text('{"step": "two"}')
    found = asyncio.run(lineage.tree(Places(None, root)))
    assert len(found["rows"]) == 2
    assert "does not name the parent" in found["problems"][0]


def test_a_version_names_its_entry_its_parent_and_the_parents_of_its_run(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(root, "first")
    folder = job(root, "second", "first", regrade=Regrade(5, "other", left_out={"without_task": 2}))
    serve_ledger(monkeypatch, ledger())
    parent = b""
    for version in (2, 3):
        manifest = Manifest(
            "r", version, version, (), (FileInfo("a", 1, "x"),), (), 1.7e9, ledger_sha256=bytes([version]) * 32,
            parent_sha256=parent or bytes(32),
        )  # fmt: skip
        (folder / f"weights/v{version}").mkdir(parents=True)
        (folder / f"weights/v{version}/manifest.pb").write_bytes(encode_manifest(manifest))
        parent = digest_of(manifest)
    source = Places(None, root).get("second")
    assert source is not None
    shown: dict[str, Any] = asyncio.run(lineage.provenance(source, 3))
    assert (shown["step"], shown["before"], shown["digest"]) == (3, 2, parent.hex())
    assert shown["manifest"].ledger_sha256 == bytes([3]) * 32
    assert shown["entry"]["step"] == 3
    assert shown["parents"] == [parent_of(folder)]
    assert asyncio.run(lineage.provenance(source, 2))["before"] is None
    assert asyncio.run(lineage.provenance(source, 1))["manifest"] is None, "the ledger still has its step"
    (folder / "weights/v2/manifest.pb").write_bytes(b"\xff\xff")
    damaged = asyncio.run(lineage.provenance(source, 3))
    assert damaged["before"] is None
    assert any("v2/manifest.pb" in one for one in damaged["problems"])
    with pytest.raises(RunError, match="keeps no manifest of version 99"):
        asyncio.run(lineage.provenance(source, 99))
