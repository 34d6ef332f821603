"""The seconds of an engine are divided among the requests at once, and add up to the time in which it works."""

import contextlib

import pytest

from trinity.explorer.types import EngineFailed
from trinity.tinker.commands.account import SAMPLE, Account
from trinity.tinker.sampler.seconds import Seconds

pytestmark = pytest.mark.core


def test_requests_at_once_share_by_their_sequences() -> None:
    account, at = Account(), [10.0]
    seconds = Seconds(account, clock=lambda: at[0])
    with seconds.of("alice", 1):
        at[0] = 12.0  # 2 s of alice
        with pytest.raises(EngineFailed), seconds.of("bob", 3):
            at[0] = 16.0  # 1 s of alice, 3 s of bob
            raise EngineFailed
        at[0] = 17.0  # 1 s of alice
    at[0] = 100.0  # idle
    with contextlib.ExitStack() as requests:
        for tenant, sequences in (("bob", 2), ("alice", 2), ("bob", 4)):
            requests.enter_context(seconds.of(tenant, sequences))
        at[0] = 108.0  # 2 s of alice, 6 s of bob
    expected = {"alice": {"requests": 2, "seconds": 6.0}, "bob": {"requests": 3, "seconds": 9.0}}
    assert account.uses == {tenant: {SAMPLE: use} for tenant, use in expected.items()}
    assert sum(use["seconds"] for use in expected.values()) == 7.0 + 8.0
