"""What the explorer loads, reports and serves, against a sync service whose answers are written here."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from support.fakes.explorers.follower import WRONG, Explorer, FakeGroup
from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.data.experience import VersionSpan
from trinity.explorer.engine.pool import compare
from trinity.explorer.weights import follower, loader
from trinity.explorer.weights.follower import WeightsWrong
from trinity.explorer.weights.load_history import Verdict, WeightsWithdrawn
from trinity.weights.manifest import Canary, CollectiveOffer, Manifest
from trinity.weights.stores.cache import Fetched
from trinity.weights.wire import ExplorerState, VersionState

pytestmark = pytest.mark.core


@pytest_asyncio.fixture
async def explorer(tmp_path: Path) -> AsyncIterator[Explorer]:
    made = Explorer(tmp_path)
    await made.start()
    yield made
    await made.stop()


async def test_the_live_version_is_loaded_and_reported(explorer: Explorer) -> None:
    await explorer.sync.show(explorer.version(3))
    await explorer.serves(3)
    assert explorer.engines.loaded == [
        (3, {"files": [str(explorer.folder / "v3" / "model.safetensors")], "tensors": [["weight", 0]]})
    ]
    report = explorer.sync.reports[-1]
    assert (report.state, report.transport, report.last_pause_seconds) == (ExplorerState.RUNNING, "folder", 0.25)
    assert (report.tokens_per_second, report.tokens_generated, report.failed_version) == (1.5, 7, -1)
    assert explorer.sync.measured(3) == pytest.approx([0.01])
    assert list(explorer.sync.joins[0].capabilities.transports) == ["folder"]
    assert await explorer.meets(3)
    assert not await explorer.meets(4)


async def test_the_base_models_canary_is_computed_without_a_load(explorer: Explorer) -> None:
    await explorer.sync.show(candidate=explorer.version(0))
    await explorer.until(lambda: explorer.sync.measured(0) != [])
    assert (explorer.engines.loaded, explorer.verdict) == ([], Verdict.OPEN)
    assert not await explorer.meets(0)
    await explorer.sync.show(explorer.version(0))
    await explorer.serves(0)
    assert (explorer.engines.loaded, explorer.engines.measured) == ([], 1)
    assert await explorer.meets(0)


async def test_nothing_is_served_before_the_first_version_is_live(explorer: Explorer) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(explorer.engines.loads.usable(), 0.2)
    with pytest.raises(WeightsWithdrawn, match="before its version was LIVE"):
        await explorer.engines.loads.settle([VersionSpan(0, 0, 5)])
    await explorer.sync.show(explorer.version(2))
    await asyncio.wait_for(explorer.engines.loads.usable(), 5)


async def test_a_live_version_that_cannot_be_described_leaves_the_one_before_in_force(explorer: Explorer) -> None:
    await explorer.sync.show(explorer.version(1), gate_step=2)
    await explorer.serves(1)
    await explorer.sync.show(problem="the manifest of version 3 is damaged", gate_step=3)
    await asyncio.sleep(0.3)
    assert await explorer.meets(2), "the gate went back"
    assert not await explorer.meets(3)
    assert explorer.engines.versions == [1]
    await explorer.sync.show(explorer.version(3))
    await explorer.serves(3)


async def test_an_explorer_without_weights_waits_for_a_version_that_it_can_load(explorer: Explorer) -> None:
    await explorer.sync.show(problem="the manifest of version 3 is damaged", gate_step=3)
    await asyncio.sleep(0.3)
    assert (explorer.engines.loaded, explorer.follower.version) == ([], -1)
    await explorer.sync.show(explorer.version(3))
    await explorer.serves(3)


async def test_a_candidate_counts_once_it_is_live(explorer: Explorer) -> None:
    await explorer.sync.show(explorer.version(1))
    await explorer.serves(1)
    await explorer.sync.show(explorer.version(1), explorer.version(2))
    await explorer.until(lambda: explorer.sync.measured(2) != [])
    assert explorer.sync.reports[-1].version == 2
    assert explorer.verdict is Verdict.OPEN
    held_back = asyncio.create_task(explorer.engines.loads.settle([VersionSpan(1, 0, 3), VersionSpan(2, 3, 5)]))
    assert await explorer.meets(1)
    assert not await explorer.meets(2), "an unverified version met a gate"
    assert not held_back.done()
    await explorer.sync.show(explorer.version(2))
    assert await held_back == (VersionSpan(1, 0, 3), VersionSpan(2, 3, 5))
    assert await explorer.meets(2)
    assert explorer.engines.versions == [1, 2]


async def test_a_candidate_that_is_verified_and_not_live_yet_counts_too(explorer: Explorer) -> None:
    explorer.sync.states[2] = VersionState.STAGED
    await explorer.sync.show(explorer.version(1))
    await explorer.serves(1)
    await explorer.sync.show(explorer.version(1), explorer.version(2))
    await explorer.until(lambda: explorer.sync.measured(2) != [])
    await explorer.sync.show(explorer.version(1))
    await asyncio.sleep(0.3)
    assert explorer.verdict is Verdict.OPEN, "STAGED is no verdict"
    explorer.sync.states[2] = VersionState.VERIFIED
    await explorer.serves(2)
    assert explorer.engines.versions == [1, 2], "it went back and forth"


async def test_an_unverified_candidate_is_not_served_once_a_newer_one_is_live(explorer: Explorer) -> None:
    explorer.sync.states[2] = VersionState.STAGED
    await explorer.sync.show(explorer.version(1), explorer.version(2))
    await explorer.until(lambda: explorer.follower.version == 2)
    explorer.engines.slow = asyncio.Event()
    await explorer.sync.show(explorer.version(3))
    with pytest.raises(WeightsWithdrawn, match="version 2, which was never judged"):
        await asyncio.wait_for(explorer.engines.loads.settle([VersionSpan(2, 0, 5)]), 5)
    explorer.engines.slow.set()
    await explorer.serves(3)


async def test_a_candidate_whose_canary_fails_is_reported_and_left_again(explorer: Explorer) -> None:
    explorer.engines.measures[2] = [WRONG]
    await explorer.sync.show(explorer.version(1))
    await explorer.serves(1)
    await explorer.sync.show(explorer.version(1), explorer.version(2))
    await explorer.until(lambda: explorer.engines.versions == [1, 2, 1])
    await explorer.serves(1)
    await explorer.until(lambda: explorer.sync.measured(2) != [])
    assert explorer.sync.measured(2)[0] == pytest.approx(3.0)
    with pytest.raises(WeightsWithdrawn, match=r"failed its canary: log-probability -1\.00000 expected, -4\.0"):
        await explorer.engines.loads.settle([VersionSpan(2, 0, 5)])
    await asyncio.sleep(0.5)
    assert explorer.engines.versions == [1, 2, 1], "it was loaded again"
    assert all(report.version in (-1, 1) for report in explorer.sync.reports)


async def test_a_candidate_that_is_rejected_is_left_for_the_live_version(explorer: Explorer) -> None:
    await explorer.sync.show(explorer.version(1), explorer.version(2))
    await explorer.until(lambda: explorer.follower.version == 2)
    await explorer.sync.show(explorer.version(1), rejected=[2])
    await explorer.serves(1)
    assert explorer.engines.versions == [1, 2, 1]
    assert [explorer.follower.is_usable(version) for version in (0, 1, 2)] == [True, True, False]
    assert [explorer.follower.is_usable(version, most_stale=0) for version in (0, 1, 2)] == [False, True, False]
    with pytest.raises(WeightsWithdrawn, match="version 2, which was rejected"):
        await explorer.engines.loads.settle([VersionSpan(2, 0, 5)])
    assert await explorer.engines.loads.settle([VersionSpan(1, 0, 2), VersionSpan(3, 2, 5)]) == (VersionSpan(1, 0, 5),)


async def test_a_live_version_whose_canary_fails_is_loaded_again_in_full(explorer: Explorer) -> None:
    explorer.engines.measures[4] = [WRONG]
    await explorer.sync.show(explorer.version(4))
    await explorer.serves(4)
    assert explorer.engines.versions == [4, 4]
    with pytest.raises(WeightsWithdrawn, match="failed its canary"):
        await explorer.engines.loads.settle([VersionSpan(1, 0, 5)])
    assert explorer.sync.measured(4)[-1] == pytest.approx(0.01)


async def test_a_live_version_that_cannot_be_computed_ends_the_explorer_with_the_reason(explorer: Explorer) -> None:
    explorer.engines.measures[4] = [WRONG, WRONG]
    await explorer.sync.show(explorer.version(4))
    error = await explorer.failure()
    assert isinstance(error, WeightsWrong)
    assert "-1.00000 expected, -4.00000 computed" in str(error)
    assert "tied embeddings" in str(error)


async def test_a_failed_load_is_repaired_by_another(explorer: Explorer) -> None:
    explorer.engines.fails[2] = 1
    await explorer.sync.show(explorer.version(2))
    await explorer.serves(2)
    assert explorer.engines.versions == [2, 2]


async def test_a_live_version_whose_load_fails_twice_ends_the_explorer(explorer: Explorer) -> None:
    explorer.engines.fails[2] = 2
    await explorer.sync.show(explorer.version(2))
    assert str(await explorer.failure()) == "boom"


async def test_a_candidate_whose_load_fails_twice_is_reported_and_left(explorer: Explorer) -> None:
    explorer.engines.fails[2] = 2
    await explorer.sync.show(explorer.version(1))
    await explorer.serves(1)
    await explorer.sync.show(explorer.version(1), explorer.version(2))
    await explorer.until(lambda: explorer.engines.versions == [1, 2, 2, 1])
    await explorer.until(lambda: any(r.failed_version == 2 and r.failure == "boom" for r in explorer.sync.reports))
    await explorer.sync.show(explorer.version(1), rejected=[2])
    await explorer.serves(1)


def damage(explorer: Explorer, version: int, short: bool = False) -> Manifest:
    """A version whose file has another last bit, or four bytes less, than its manifest says."""
    damaged = explorer.version(version)
    path = explorer.folder / f"v{version}" / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-4] if short else content[:-1] + bytes([content[-1] ^ 1]))
    return damaged


@pytest.mark.parametrize("live", [True, False])
async def test_damaged_files_are_found_before_the_engines_pause(explorer: Explorer, live: bool) -> None:
    """A candidate is checked while it is loaded, but for its size."""
    await explorer.sync.show(explorer.version(1))
    await explorer.serves(1)
    damaged = damage(explorer, 2, short=not live)
    await explorer.sync.show(*([damaged] if live else [explorer.version(1), damaged]))
    await explorer.until(lambda: any("model.safetensors" in r.failure for r in explorer.sync.reports))
    failed = next(r for r in explorer.sync.reports if r.failure)
    assert (failed.failed_version, failed.version) == (2, 1)
    assert explorer.engines.versions == [1]
    await explorer.sync.show(explorer.version(3))
    await explorer.serves(3)


@pytest.mark.parametrize("gone", [False, True])
async def test_a_candidate_that_turns_out_damaged_is_left_for_the_live_version(
    explorer: Explorer, gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again, but its files are then checked first: the engines do not load it over and over."""
    if gone:
        monkeypatch.setattr(loader, "check_files", lambda manifest, folder: (folder / "gone").read_bytes())
    monkeypatch.setattr(follower, "_RETRY_SECONDS", 0.1)
    fetched: list[int] = []
    fetch = explorer.cache.fetch

    def counted(manifest: Manifest) -> Fetched:
        fetched.append(manifest.version)
        return fetch(manifest)

    monkeypatch.setattr(explorer.cache, "fetch", counted)
    await explorer.sync.show(explorer.version(1))
    await explorer.serves(1)
    await explorer.sync.show(explorer.version(1), damage(explorer, 2))
    await explorer.until(lambda: any("model.safetensors" in r.failure for r in explorer.sync.reports))
    await explorer.serves(1)
    await explorer.until(lambda: fetched.count(2) >= 3)
    assert explorer.engines.versions == [1, 2, 1]
    assert explorer.sync.measured(2) == [], "damaged files say nothing about the engine"
    with pytest.raises(WeightsWithdrawn, match="version 2, which was loaded from damaged files"):
        await explorer.engines.loads.settle([VersionSpan(2, 0, 5)])


async def test_a_candidate_is_loaded_and_measured_while_its_files_are_checked(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = threading.Event()
    monkeypatch.setattr(loader, "check_files", lambda *_: checked.wait(20))
    await explorer.sync.show(explorer.version(1))
    await explorer.serves(1)
    await explorer.sync.show(explorer.version(2), explorer.version(3))
    await explorer.until(lambda: explorer.engines.versions[-1:] == [3] and explorer.engines.measured == 2)
    explorer.engines.loads.verify(3)  # sync may be faster
    await asyncio.sleep(0.2)
    assert explorer.verdict is Verdict.OPEN and explorer.sync.measured(3) == []
    checked.set()
    await explorer.until(lambda: explorer.verdict is Verdict.GOOD and explorer.sync.measured(3) != [])


async def test_a_rollback_does_not_wait_for_an_evaluation(explorer: Explorer) -> None:
    await explorer.sync.show(explorer.version(1))
    await explorer.serves(1)
    await explorer.sync.show(explorer.version(2))
    await explorer.serves(2)
    explorer.evaluating = True
    await explorer.sync.show(explorer.version(1), rejected=[2], gate_step=2)
    await explorer.serves(1)
    assert explorer.engines.versions == [1, 2, 1]
    with pytest.raises(WeightsWithdrawn, match="withdrawn"):
        await explorer.engines.loads.settle([VersionSpan(2, 0, 4)])
    assert await explorer.meets(2), "tasks of the withdrawn step wait for ever"
    assert not await explorer.meets(3)


async def test_a_rollback_to_version_0_loads_the_base_models_own_files(explorer: Explorer) -> None:
    await explorer.sync.show(explorer.version(0))
    await explorer.serves(0)
    await explorer.sync.show(explorer.version(1))
    await explorer.serves(1)
    await explorer.sync.show(explorer.version(0), rejected=[1], gate_step=1)
    await explorer.serves(0)
    files = [str(explorer.base / "model.safetensors")]
    assert explorer.engines.loaded[-1] == (0, {"files": files, "tensors": [["weight", 0]]})
    assert await explorer.meets(1)


async def test_newer_versions_wait_for_an_evaluation(explorer: Explorer) -> None:
    await explorer.sync.show(explorer.version(1))
    await explorer.serves(1)
    explorer.evaluating = True
    await explorer.sync.show(explorer.version(2), explorer.version(3))
    await asyncio.sleep(0.3)
    assert explorer.engines.versions == [1]
    explorer.evaluating = False
    await explorer.follower.notify()
    await explorer.until(lambda: explorer.follower.version == 3)


async def test_gates_follow_the_service_when_steps_were_rejected(explorer: Explorer) -> None:
    await explorer.sync.show(explorer.version(1))
    await explorer.serves(1)
    assert not await explorer.meets(2)
    await explorer.sync.show(explorer.version(1), rejected=[2, 3], gate_step=3)
    assert await explorer.meets(3)
    assert not await explorer.meets(4)


async def test_a_restarted_service_gets_the_canary_again(explorer: Explorer) -> None:
    await explorer.sync.show(explorer.version(1), explorer.version(2))
    await explorer.until(lambda: explorer.sync.measured(2) != [])
    await explorer.sync.stop()
    explorer.sync.reports.clear()
    await asyncio.sleep(0.3)
    await explorer.sync.start()
    await explorer.until(lambda: explorer.sync.measured(2) != [], 20)
    assert len(explorer.sync.joins) == 2
    assert explorer.engines.versions == [1, 2]


async def test_an_explorer_that_left_does_not_come_back(explorer: Explorer) -> None:
    await explorer.sync.show(explorer.version(1))
    await explorer.serves(1)
    await explorer.follower.leave()
    await asyncio.sleep(2)  # longer than the lease
    assert explorer.running is not None
    assert not explorer.running.done()
    assert len(explorer.sync.joins) == 1


async def test_a_broadcast_is_loaded_and_a_failed_one_is_repaired_from_storage(tmp_path: Path) -> None:
    group = FakeGroup({2: {"epoch": 1}, 3: {"epoch": 1}})
    explorer = Explorer(tmp_path, group)
    await explorer.start()
    try:
        await explorer.sync.show(explorer.version(1), epoch=pb.Epoch(number=1))
        await explorer.serves(1)

        def broadcast(version: int) -> Manifest:
            whole = explorer.version(version)
            return replace(whole, offers=(*whole.offers, CollectiveOffer(1, 1024)))

        await explorer.sync.show(explorer.version(1), broadcast(2), epoch=pb.Epoch(number=1))
        await explorer.until(lambda: explorer.follower.version == 2)
        await explorer.sync.show(broadcast(2), epoch=pb.Epoch(number=1))
        await explorer.serves(2)
        assert explorer.engines.loaded[-1] == (2, {"epoch": 1})
        assert explorer.sync.reports[-1].transport == "collective-gloo"
        assert list(explorer.sync.joins[0].capabilities.transports) == ["folder", "collective-gloo"]

        explorer.engines.fails[3] = 1
        await explorer.sync.show(broadcast(2), broadcast(3), epoch=pb.Epoch(number=1))
        await explorer.until(lambda: explorer.follower.version == 3)
        assert explorer.engines.versions == [1, 2, 3, 3]
        assert (explorer.engines.loaded[-2][1], explorer.follower.reports.transport) == ({"epoch": 1}, "folder")

        explorer.evaluating = True
        await explorer.sync.show(broadcast(3), broadcast(4))
        await explorer.until(lambda: (4, False) in group.asked)
        explorer.evaluating = False
        await explorer.follower.notify()
        await explorer.until(lambda: explorer.follower.version == 4)
        assert explorer.follower.reports.transport == "folder"
        assert group.asked == [(2, True), (3, True), (4, False)]
    finally:
        await explorer.stop()
    assert group.epochs == [1, 0, -1]


def test_a_canary_is_judged_by_its_worst_value() -> None:
    expected = np.array([-1.0, -2.0, -3.0], np.float32)
    found = compare(expected, np.array([-1.0, -2.5, -3.1], np.float32))
    assert (found.max_error, found.expected, found.computed) == (0.5, -2.0, -2.5)
    assert found.mean_error == pytest.approx(0.2, abs=1e-6)
    assert found.within(Canary((), 0.21, 0.51))
    assert not found.within(Canary((), 0.19, 0.51))
    assert not found.within(Canary((), 0.21, 0.49))
    for broken in (np.nan, -np.inf):
        found = compare(expected, np.array([-9.0, broken, -3.0], np.float32))
        assert found.expected == -2.0
        assert not found.within(Canary((), 1e9, 1e9))
