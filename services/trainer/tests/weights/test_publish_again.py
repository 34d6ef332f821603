"""Versions that are published again, and those that never are: a publisher beside a real sync service."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from support.programs.forked_run import ForkedService
from support.programs.trainer.releases import JudgingExplorer, Sync
from trinity.runtime.broker import Bucket, connect
from trinity.runtime.errors import AlreadyExists, Conflict
from trinity.runtime.names import MANIFESTS_BUCKET
from trinity.trainer.weights.claim import Claim
from trinity.trainer.weights.publisher import Publisher, VersionLost
from trinity.trainer.weights.shards import describe
from trinity.trainer.weights.verification import VerificationResults
from trinity.trainer.weights.version_stores import VersionStores
from trinity.weights import client as calls
from trinity.weights.client import BlockingSyncClient, Call, release
from trinity.weights.manifest import Canary, CollectiveOffer, Manifest, Offer, Probe, check_files
from trinity.weights.stores import FolderStore, Store
from trinity.weights.wire import decode_manifest, digest_of

pytestmark = pytest.mark.core

RUN = "tests-again-000000"
SIZE = 10_000
LAYOUT = [describe("w", torch.float32, (SIZE,))]
CANARY = Canary((Probe((1, 2), (-1.0,)),), 1e-3, 1e-2)


Send = Callable[[Call[Any]], Any]


@contextlib.contextmanager
def publishing(monkeypatch: pytest.MonkeyPatch, work: Callable[[Send, Call[Any]], Any]) -> Iterator[None]:
    """`work` is given every publication, to send it when it likes."""
    ask = BlockingSyncClient.ask

    def asked(client: BlockingSyncClient, call: Call[Any]) -> Any:
        return work(lambda c: ask(client, c), call) if call.method == "Publish" else ask(client, call)

    with monkeypatch.context() as patched:
        patched.setattr(BlockingSyncClient, "ask", asked)
        yield


class Killed(Exception):
    """The trainer ends here, as by kill -9."""


class Remote(FolderStore):
    """A folder in the place of a store that takes differences."""

    kind: ClassVar[str] = "s3"


@pytest.fixture
def sync(tmp_path: Path, nats_url: str) -> Iterator[ForkedService]:
    service = ForkedService("sync", tmp_path, NATS_URL=nats_url, CLAIM_SECONDS="60")
    service.start()
    yield service
    service.kill()


def start(
    sync: ForkedService,
    folder: Path,
    stores: Sequence[Store] = (),
    stops: bool = True,
    rollback: int = 0,
    base: Canary | None = None,
) -> Publisher:
    """One that hears of a rollback when it asks: the claim is renewed by itself every 20 seconds alone."""
    client = BlockingSyncClient(sync.address, RUN)
    claim = Claim(client)
    claim.start()
    stores = stores or [FolderStore(folder / "weights", RUN), FolderStore(folder / "shared", RUN)]
    results = VerificationResults(client, lambda: claim.renew().withdrawn, stops, allowed=(1.0, 1.0))
    publisher = Publisher(
        client, claim, results, VersionStores(folder / "weights", RUN, stores, 9, ""), versions_to_keep=3
    )
    if publisher.open(rollback).is_new:
        publisher.announce_base("a model", base)
    return publisher


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    """All but the first element are the same in all versions."""
    return [("w", torch.cat([torch.tensor([value]), torch.zeros(SIZE - 1)]))]


def publish(publisher: Publisher, step: int, value: float, canary: Canary | None = None, due: bool = True) -> None:
    assert publisher.wants(step, due)
    publisher.publish(step, LAYOUT, weights(value), canary)


def value_of(publisher: Publisher, version: int) -> float:
    return float(dict(publisher.read(version))["w"][0])


def follow(publisher: Publisher) -> None:
    assert publisher.due_rollback is not None
    publisher.follows(publisher.due_rollback)


def test_a_version_that_a_rollback_kept_out_is_made_of_the_older_weights(sync: ForkedService, tmp_path: Path) -> None:
    """Its step may be the gate of the next batch, so there must be one."""
    known, publisher = Sync(sync.address, RUN), start(sync, tmp_path)
    for step in (1, 2):
        publish(publisher, step, float(step))
    known.roll_back(1)
    publish(publisher, 3, 33.0)
    assert 3 not in known.states()
    follow(publisher)
    assert not publisher.wants(2)
    publish(publisher, 3, 1.0)
    assert known.states() == {0: "RETIRED", 1: "RETIRED", 2: "REJECTED", 3: "LIVE"}
    assert value_of(publisher, 3) == 1.0
    publisher.close()


def test_a_version_names_its_ledger_entry_and_the_version_before(sync: ForkedService, tmp_path: Path) -> None:
    """Also after a restart of the trainer and after a rollback; the places that offer a version do not count."""
    known, publisher = Sync(sync.address, RUN), start(sync, tmp_path)
    for step in (1, 2):
        publisher.publish(step, LAYOUT, weights(float(step)), None, bytes([step]) * 32)
    publisher.close()
    publisher = start(sync, tmp_path)
    publisher.publish(3, LAYOUT, weights(3.0), None, bytes([3]) * 32)
    known.roll_back(1)
    follow_when_told(publisher)
    publisher.publish(4, LAYOUT, weights(4.0), None, bytes([4]) * 32)
    publisher.publish(5, LAYOUT, weights(5.0), None, bytes([5]) * 32)
    known.roll_back(4)
    follow_when_told(publisher)
    applied = publisher.followed_rollback
    publisher.close()
    publisher = start(sync, tmp_path, rollback=applied)
    publisher.publish(6, LAYOUT, weights(6.0), None, bytes([6]) * 32)
    manifests = {}
    for version in range(7):
        folder = tmp_path / f"weights/v{version}"
        found = publisher._client.ask(calls.version(version)).manifest
        manifests[version] = found
        if version:
            assert found.ledger_sha256 == bytes([version]) * 32
            if (folder / "manifest.pb").exists():
                assert digest_of(decode_manifest((folder / "manifest.pb").read_bytes())) == digest_of(found)
    parents = {digest_of(manifest): version for version, manifest in manifests.items()}
    named = {version: parents.get(manifests[version].parent_sha256) for version in range(1, 7)}
    assert named == {1: 0, 2: 1, 3: 2, 4: 1, 5: 4, 6: 4}
    publisher.close()


def follow_when_told(publisher: Publisher) -> None:
    publisher.poll()
    follow(publisher)


def test_what_a_rollback_has_withdrawn_is_not_made_again(
    sync: ForkedService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollback comes before the answer, so the version is published twice: the gate is met without it."""
    known, publisher = Sync(sync.address, RUN), start(sync, tmp_path)
    publish(publisher, 1, 1.0)

    def send_and_roll_back(send: Send, call: Call[Any]) -> Any:
        send(call)
        known.roll_back(0)
        return send(call)

    with publishing(monkeypatch, send_and_roll_back):
        publish(publisher, 2, 2.0)
    follow(publisher)
    assert not publisher.wants(2)
    assert publisher.wants(3)
    publisher.close()


def test_a_live_version_is_known_however_many_a_rollback_withdrew(
    sync: ForkedService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity.trainer.weights.publisher._LISTED", 2)
    known, publisher = Sync(sync.address, RUN), start(sync, tmp_path)
    for step in (1, 2, 3, 4):
        publish(publisher, step, float(step))
    known.roll_back(2)
    publisher.close()
    publisher = start(sync, tmp_path, rollback=1)
    assert publisher.live_version == 2
    publisher.close()


@pytest.mark.parametrize("followed", [False, True], ids=["neither was followed", "the first one was followed"])
def test_two_rollbacks_are_no_verdict_on_what_the_first_one_withdrew(
    followed: bool, sync: ForkedService, tmp_path: Path
) -> None:
    """The trainer was busy, and polls its version's result after the second."""
    known, publisher = Sync(sync.address, RUN), start(sync, tmp_path)
    for step in (1, 2, 3):
        publish(publisher, step, float(step))
    known.roll_back(1)
    if followed:
        publisher._claim.renew()
        follow(publisher)
    known.roll_back(0)
    assert not publisher.poll()
    publisher._claim.renew()
    assert publisher.due_rollback is not None
    assert (publisher.due_rollback.number, publisher.due_rollback.version) == (2, 0)
    follow(publisher)
    publish(publisher, 4, 4.0)
    assert known.states()[4] == "LIVE"
    publisher.close()


@pytest.mark.parametrize("value", [2.0, 7.0], ids=["the same weights", "other weights"])
def test_a_trainer_that_died_before_it_published_does_so_when_it_is_back(
    value: float, sync: ForkedService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, publisher = Sync(sync.address, RUN), start(sync, tmp_path)
    publish(publisher, 1, 1.0)

    def die(*_: object) -> None:
        raise Killed

    with publishing(monkeypatch, die), pytest.raises(Killed):
        publish(publisher, 2, 2.0)
    assert publisher.newest_step == 1
    assert (tmp_path / "shared/v2/manifest.pb").exists()
    publisher.close()
    successor = start(sync, tmp_path)
    publish(successor, 2, value)
    assert known.states()[2] == "LIVE"
    assert value_of(successor, 2) == value
    assert FolderStore(tmp_path / "shared", RUN).manifest(2) == known.manifest(2)
    successor.close()


def test_a_trainer_that_died_before_the_answer_finds_its_version(
    sync: ForkedService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, publisher = Sync(sync.address, RUN), start(sync, tmp_path)

    def send_and_die(send: Send, call: Call[Any]) -> None:
        send(call)
        raise Killed

    with publishing(monkeypatch, send_and_die), pytest.raises(Killed):
        publish(publisher, 1, 1.0)
    publisher.close()
    successor = start(sync, tmp_path)
    assert known.states() == {0: "RETIRED", 1: "LIVE"}
    assert successor.live_version == 1
    assert not successor.wants(1)
    successor.close()


def test_a_manifest_that_is_damaged_in_nats_is_published_again(
    sync: ForkedService, tmp_path: Path, nats_url: str
) -> None:
    known, publisher = Sync(sync.address, RUN), start(sync, tmp_path)
    publish(publisher, 1, 1.0)
    before = known.manifest(1)

    async def damage() -> None:
        async with await connect(nats_url, "test") as broker:
            bucket = await Bucket.open(broker, MANIFESTS_BUCKET)
            for key in await bucket.entries(f"{RUN}"):
                await bucket.update(key, lambda value: value[:-1])

    asyncio.run(damage())
    sync.kill()
    sync.start()
    assert known.manifest(1).files == ()
    with pytest.raises(Conflict, match="cannot read its manifest"):
        publisher.read(1)
    publisher._claim.renew()
    publisher.poll()
    assert known.manifest(1) == before
    assert value_of(publisher, 1) == 1.0
    publisher.close()


def test_a_difference_whose_base_is_rejected_before_it_is_published_goes_out_whole(
    sync: ForkedService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With on_rejected continue; it is in the stores as a difference by then."""
    own, remote = FolderStore(tmp_path / "weights", RUN), Remote(tmp_path / "remote", RUN)
    known, publisher = Sync(sync.address, RUN), start(sync, tmp_path, [own, remote], stops=False)
    publish(publisher, 1, 1.0, CANARY)
    sent = []

    def send_after_the_verdict(send: Send, call: Call[Any]) -> Any:
        sent.append(call.request.manifest.HasField("delta"))
        with JudgingExplorer(sync.address, RUN, lambda _: 0.5):
            deadline = time.monotonic() + 60
            while known.states()[1] != "REJECTED":
                assert time.monotonic() < deadline
                time.sleep(0.05)
        return send(call)

    with publishing(monkeypatch, send_after_the_verdict):
        publish(publisher, 2, 2.0)
    assert sent == [True, False]
    assert known.states() == {0: "RETIRED", 1: "REJECTED", 2: "LIVE"}
    assert own.manifest(2) == remote.manifest(2) == known.manifest(2)
    check_files(known.manifest(2), tmp_path / "remote/v2")
    publisher.close()


@pytest.mark.parametrize("moment", ["before", "while it writes", "between two stores"])
def test_a_trainer_that_lost_the_run_leaves_its_successors_files_alone(
    moment: str, sync: ForkedService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was frozen, and does not know of the loss when it continues."""
    known, frozen = Sync(sync.address, RUN), start(sync, tmp_path)
    publish(frozen, 1, 1.0)
    put, successors = FolderStore.put, []

    def take_over() -> None:
        frozen._client.ask(release(frozen._claim.held.lease_id))
        successors.append(start(sync, tmp_path))
        publish(successors[0], 2, 2.0)

    def late() -> Iterator[tuple[str, torch.Tensor]]:
        if moment == "while it writes":
            take_over()
        yield from weights(7.0)

    def put_late(store: FolderStore, manifest: Manifest, source: Path, delta: bool) -> Offer:
        monkeypatch.undo()
        take_over()
        return put(store, manifest, source, delta)

    if moment == "before":
        take_over()
    if moment == "between two stores":
        monkeypatch.setattr(FolderStore, "put", put_late)
    with pytest.raises(AlreadyExists, match="this trainer has lost the run"):
        frozen.publish(2, LAYOUT, late(), None)
    manifest = known.manifest(2)
    for place in ("weights", "shared"):
        check_files(manifest, tmp_path / place / "v2")
        assert FolderStore(tmp_path / place, RUN).manifest(2) == manifest
    frozen.close()
    successors[0].close()


class TestTheMachinesMemoryIsGone:
    """The one store is the folder, and it is empty when the trainer is back."""

    def start(self, sync: ForkedService, folder: Path) -> Publisher:
        return start(sync, folder, [FolderStore(folder / "weights", RUN)])

    def lose(self, publisher: Publisher, folder: Path) -> None:
        publisher.close()
        shutil.rmtree(folder / "weights")

    def test_weights_past_the_live_version_are_a_version_at_once(self, sync: ForkedService, tmp_path: Path) -> None:
        """Due or not: explorers can verify versions only after they have loaded a LIVE one."""
        known, publisher = Sync(sync.address, RUN), self.start(sync, tmp_path)
        publish(publisher, 10, 10.0)
        assert not publisher.wants(15, due=False)
        self.lose(publisher, tmp_path)
        successor = self.start(sync, tmp_path)
        successor.check_lost(15)
        publish(successor, 15, 15.0, CANARY, due=False)
        assert known.states() == {0: "RETIRED", 10: "RETIRED", 15: "LIVE"}
        check_files(known.manifest(15), tmp_path / "weights/v15")
        assert not successor.wants(16, due=False)
        successor.close()

    def test_a_trainer_that_can_mend_nothing_ends_for_good_and_says_what_helps(
        self, sync: ForkedService, tmp_path: Path
    ) -> None:
        known, publisher = Sync(sync.address, RUN), self.start(sync, tmp_path)
        publish(publisher, 9, 9.0)
        publish(publisher, 10, 10.0, CANARY)
        before = known.manifest(9), known.manifest(10)
        self.lose(publisher, tmp_path)
        successor = self.start(sync, tmp_path)
        with pytest.raises(
            VersionLost, match=r"files of version 9, which is LIVE.*checkpoints of steps after 9"
        ) as lost:
            successor.check_lost(10)
        assert lost.value.for_good
        successor.check_lost(8)  # what it says helps
        for step in (9, 10):
            publish(successor, step, float(step))
            check_files(before[step - 9], tmp_path / f"weights/v{step}")
        assert known.states() == {0: "RETIRED", 9: "LIVE", 10: "STAGED"}
        assert (known.manifest(9), known.manifest(10)) == before
        assert not successor.wants(10)
        successor.close()

    def test_what_another_store_has_is_not_lost(self, sync: ForkedService, tmp_path: Path) -> None:
        publisher = start(sync, tmp_path)
        publish(publisher, 9, 9.0)
        publish(publisher, 10, 10.0, CANARY)
        self.lose(publisher, tmp_path)
        successor = start(sync, tmp_path)
        successor.check_lost(10)
        assert not successor.wants(11, due=False)
        successor.close()


class Members:
    """A collective group that takes every version. `there`: the versions whose files were there when it got one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.there: list[set[str]] = []

    def offer(self, lease_id: str) -> CollectiveOffer:
        return CollectiveOffer(1, 1024)

    def send(self, manifest: Manifest, weights: object) -> None:
        self.there.append({path.name for path in self._folder.glob("v*")})

    def close(self) -> None: ...


def test_members_get_a_version_before_old_files_are_deleted(sync: ForkedService, tmp_path: Path) -> None:
    members: Any = Members(tmp_path / "weights")
    with contextlib.closing(start(sync, tmp_path)) as publisher:
        publisher._collective = members
        for step in range(1, 5):
            assert publisher.publish(step, LAYOUT, weights(step), None)
            publisher.broadcast(weights(step))
    assert members.there[-1] == {"v1", "v2", "v3", "v4"}
    assert {path.name for path in (tmp_path / "weights").glob("v*")} == {"v2", "v3", "v4"}


@pytest.mark.parametrize(("base", "live"), [(CANARY, -1), (None, 0)], ids=["a new run", "a fork"])
def test_the_last_version_waits_for_explorers_that_are_still_to_come(
    sync: ForkedService, tmp_path: Path, base: Canary | None, live: int
) -> None:
    publisher = start(sync, tmp_path, base=base)
    publish(publisher, 1, 1.0, CANARY)
    publisher.settle(60.0, lambda: False)
    assert publisher.live_version == live
    settle_as_an_explorer_comes(publisher, sync)
    assert publisher.live_version == 1
    publish(publisher, 2, 2.0, CANARY)
    publisher.settle(60.0, lambda: False, awaits_explorers=True)  # one was there, and may not come back
    assert publisher.live_version == 1
    publisher.close()


def test_a_run_that_starts_again_waits_for_its_explorers(sync: ForkedService, tmp_path: Path) -> None:
    """They verify the version that the trainer before published, and evaluate it: the run ends after that."""
    with JudgingExplorer(sync.address, RUN):
        publisher = start(sync, tmp_path, base=CANARY)
        publish(publisher, 1, 1.0, CANARY)
        publisher.settle(60.0, lambda: False)
    publish(publisher, 2, 2.0, CANARY)
    publisher.close()
    again = start(sync, tmp_path)
    assert again.live_version == 1
    settle_as_an_explorer_comes(again, sync)
    assert again.live_version == 2
    again.close()
    third = start(sync, tmp_path)
    assert third.live_version == 2  # which the buffer is asked for
    third.settle(60.0, lambda: False, awaits_explorers=True)  # nothing is left to verify
    third._removes_files = True  # explorers get them before
    settle_as_an_explorer_comes(third, sync)
    assert not (tmp_path / "weights").exists()
    third.close()


def settle_as_an_explorer_comes(publisher: Publisher, sync: ForkedService) -> None:
    with ThreadPoolExecutor(1) as thread:
        settling = thread.submit(publisher.settle, 60.0, lambda: False, awaits_explorers=True)
        time.sleep(1.0)
        assert not settling.done()
        with JudgingExplorer(sync.address, RUN):
            settling.result(60)
