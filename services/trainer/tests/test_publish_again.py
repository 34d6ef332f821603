"""What is published again, and what never is: a publisher without an engine beside a real sync service."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.releases import Sync
from support.service import ServiceProcess
from trinity.runtime.weights.stores import FolderStore
from trinity.trainer.weights.claim import Claim
from trinity.trainer.weights.client import Rollback, SyncClient
from trinity.trainer.weights.places import Places
from trinity.trainer.weights.publisher import Publisher
from trinity.trainer.weights.shards import describe
from trinity.trainer.weights.verdicts import Verdicts

RUN = "tests-again-000000"
LAYOUT = [describe("w", torch.float32, (3,))]


class Killed(Exception):
    """The trainer ends here, as by kill -9."""


@pytest.fixture
def sync(tmp_path: Path, nats_url: str) -> Iterator[ServiceProcess]:
    service = ServiceProcess("sync", tmp_path, NATS_URL=nats_url, CLAIM_SECONDS="60")
    service.start()
    yield service
    service.kill()


def start(sync: ServiceProcess, folder: Path) -> Publisher:
    """One that hears of a rollback when it asks: the claim is renewed by itself every 20 seconds alone."""
    client = SyncClient(sync.address, RUN)
    claim = Claim(client)
    claim.start()
    stores = [FolderStore(folder / "weights", RUN), FolderStore(folder / "shared", RUN)]

    def newest_rollback() -> Rollback:
        claim.renew()
        return claim.rollback

    verdicts = Verdicts(client, newest_rollback, stops=True, allowed=(1.0, 1.0))
    publisher = Publisher(client, claim, verdicts, Places(folder / "weights", RUN, stores, 9, ""), versions_to_keep=3)
    if publisher.open(0).is_new:
        publisher.announce_base("a model", None)
    return publisher


def publish(publisher: Publisher, step: int, value: float) -> None:
    assert publisher.wants(step)
    publisher.publish(step, LAYOUT, [("w", torch.full((3,), value))], None)


def value_of(publisher: Publisher, version: int) -> float:
    return float(dict(publisher.read(version))["w"][0])


def follow(publisher: Publisher) -> None:
    assert publisher.due_rollback is not None
    publisher.follows(publisher.due_rollback)


def test_a_version_that_a_rollback_kept_out_is_made_of_the_older_weights(sync: ServiceProcess, tmp_path: Path) -> None:
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


def test_what_a_rollback_has_withdrawn_is_not_made_again(
    sync: ServiceProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollback comes between Stage and Commit: the gate is met without the version."""
    known, publisher = Sync(sync.address, RUN), start(sync, tmp_path)
    publish(publisher, 1, 1.0)
    stage = SyncClient.stage

    def stage_and_roll_back(client: SyncClient, *arguments: object) -> None:
        stage(client, *arguments)  # type: ignore[arg-type]
        known.roll_back(0)

    with monkeypatch.context() as patched:
        patched.setattr(SyncClient, "stage", stage_and_roll_back)
        publish(publisher, 2, 2.0)
    follow(publisher)
    assert not publisher.wants(2)
    assert publisher.wants(3)
    publisher.close()


@pytest.mark.parametrize("value", [2.0, 7.0], ids=["the same weights", "other weights"])
def test_a_trainer_that_died_before_stage_publishes_the_version_when_it_is_back(
    value: float, sync: ServiceProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, publisher = Sync(sync.address, RUN), start(sync, tmp_path)
    publish(publisher, 1, 1.0)

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(SyncClient, "stage", die)
        with pytest.raises(Killed):
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


def test_a_trainer_that_died_before_commit_commits_when_it_is_back(
    sync: ServiceProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, publisher = Sync(sync.address, RUN), start(sync, tmp_path)

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(SyncClient, "commit", die)
        with pytest.raises(Killed):
            publish(publisher, 1, 1.0)
    assert known.states() == {0: "LIVE", 1: "VERIFIED"}
    publisher.close()
    successor = start(sync, tmp_path)
    assert known.states() == {0: "RETIRED", 1: "LIVE"}
    assert not successor.wants(1)
    successor.close()
