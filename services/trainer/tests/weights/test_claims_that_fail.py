"""An unexpected error while the claim is taken or renewed ends the trainer, and does not leave it waiting."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from trinity.runtime import waits
from trinity.runtime.errors import Unavailable
from trinity.runtime.process import free_port
from trinity.trainer.weights.claim import Claim
from trinity.weights import client as calls
from trinity.weights.client import BlockingSyncClient, Claimed

pytestmark = pytest.mark.core


class Client:
    """Answers that number of calls, and fails then."""

    def __init__(self, answers: int, error: Exception | None = None) -> None:
        self.answers = answers
        self.given_up = False
        self.error = error or ValueError("an answer that is not understood")

    def give_up(self) -> None:
        self.given_up = True

    def ask_once(self, call: Any) -> Claimed:
        self.answers -= 1
        if self.answers < 0:
            raise self.error
        return Claimed("lease", 0.03)


def test_it_ends_who_waits_for_the_claim() -> None:
    client: Any = Client(0)
    claim = Claim(client)
    claim.start()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(claim.wait)
        try:
            with pytest.raises(ValueError, match="is not understood"):
                waiting.result(timeout=5)
        finally:
            claim._decided.set()
    claim.close()


def test_it_ends_who_has_the_claim() -> None:
    client: Any = Client(2)
    claim = Claim(client)
    claim.start()
    claim.wait()
    end = time.monotonic() + 5
    with pytest.raises(ValueError, match="is not understood"):
        while time.monotonic() < end:
            claim.check()
            time.sleep(0.01)
    claim.close()


def test_a_sync_service_that_stays_away_ends_who_has_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity.trainer.weights.claim._RETRY_SECONDS", 0.02)
    client: Any = Client(2, Unavailable("nobody at s:1"))
    claim = Claim(client)
    claim._absence = waits.Absence("the sync service", 0.3)
    claim.start()
    claim.wait()
    end = time.monotonic() + 5
    with pytest.raises(Unavailable, match=r"the sync service was away for 0.3 s: nobody at s:1"):
        while time.monotonic() < end:
            claim.check()
            time.sleep(0.01)
    assert client.given_up
    claim.close()


def test_a_call_that_is_repeated_ends_when_the_service_is_given_up() -> None:
    client = BlockingSyncClient(f"127.0.0.1:{free_port()}", "run")
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(client.ask, calls.version(3))
        try:
            with pytest.raises(TimeoutError):
                asking.result(timeout=0.5)
        finally:
            client.give_up()
        with pytest.raises(Unavailable):
            asking.result(timeout=10)
    client.close()
