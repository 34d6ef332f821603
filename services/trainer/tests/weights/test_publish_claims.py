"""One trainer a run: claims at a real sync service, without an engine."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.programs.forked_run import ForkedService
from trinity.runtime.errors import AlreadyExists
from trinity.trainer.weights.claim import Claim
from trinity.weights import client as calls
from trinity.weights.client import BlockingSyncClient

pytestmark = pytest.mark.core

RUN = "tests-claims-000000"
LEASE_SECONDS = 2.0


@pytest.fixture
def sync(tmp_path: Path, nats_url: str) -> Iterator[ForkedService]:
    service = ForkedService("sync", tmp_path, NATS_URL=nats_url, CLAIM_SECONDS=str(LEASE_SECONDS))
    service.start()
    yield service
    service.kill()


def claim(sync: ForkedService, patience_seconds: float = 10.0) -> Claim:
    made = Claim(BlockingSyncClient(sync.address, RUN), patience_seconds)
    made.start()
    return made


def test_a_claim_lives_as_long_as_its_trainer_and_a_second_one_is_refused(sync: ForkedService) -> None:
    first = claim(sync)
    first.wait()
    begin = time.monotonic()
    second = claim(sync, patience_seconds=2 * LEASE_SECONDS)
    with pytest.raises(AlreadyExists, match=r"the trainer of process .* has this run"):
        second.wait()
    assert time.monotonic() - begin >= 2 * LEASE_SECONDS
    first.check()
    first.close()


def test_a_successor_waits_until_the_claim_of_a_killed_trainer_has_ended(sync: ForkedService) -> None:
    client = BlockingSyncClient(sync.address, RUN)
    client.ask_once(calls.claim("a trainer that is killed now"))
    successor = claim(sync)
    successor.wait()
    assert successor.held.lease_id
    successor.close()


def test_a_run_that_was_released_is_free_at_once(sync: ForkedService) -> None:
    first = claim(sync)
    first.wait()
    first.close()
    second = claim(sync, patience_seconds=0.0)
    second.wait()
    second.close()


def test_a_trainer_that_was_away_too_long_loses_the_run_to_another_one(sync: ForkedService) -> None:
    first = claim(sync)
    first.wait()
    first._closed.set()  # its process is stopped: it renews no more
    second = claim(sync)
    second.wait()
    first._closed.clear()
    with pytest.raises(AlreadyExists, match="this trainer has lost the run"):
        first.renew()
    with pytest.raises(AlreadyExists, match="this trainer has lost the run"):
        first.check()
    second.check()
    second.close()


def test_a_claim_outlives_the_service(sync: ForkedService) -> None:
    first = claim(sync)
    first.wait()
    lease_id = first.held.lease_id
    sync.kill()
    time.sleep(1.5 * LEASE_SECONDS)
    sync.start()
    time.sleep(1.5 * LEASE_SECONDS)  # a claim that is not renewed would have ended
    first.check()
    assert first.held.lease_id == lease_id
    second = claim(sync, patience_seconds=0.0)
    with pytest.raises(AlreadyExists):
        second.wait()
    first.close()
