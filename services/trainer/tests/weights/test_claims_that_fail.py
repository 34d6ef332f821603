"""An unexpected error while the claim is taken or renewed ends the trainer, and does not leave it waiting."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from trinity.trainer.weights.claim import Claim
from trinity.weights.client import Claimed

pytestmark = pytest.mark.core


class Client:
    """Answers that number of calls, and fails then."""

    def __init__(self, answers: int) -> None:
        self.answers = answers

    def ask_once(self, call: Any) -> Claimed:
        self.answers -= 1
        if self.answers < 0:
            raise ValueError("an answer that is not understood")
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
