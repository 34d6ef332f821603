"""A tenant whose commands wait gets 429 for more, and others do not."""

import pytest

from trinity.runtime.errors import Full
from trinity.tinker.commands.log import Command, Kind
from trinity.tinker.gateway import quotas
from trinity.tinker.gateway.quotas import Quotas

pytestmark = pytest.mark.core


def _command(position: int, tenant: str, size: int = 10, time: float = 1000.0) -> Command:
    return Command(Kind.OPTIM_STEP, tenant, "m", 1, b"x" * size, time, position)


def test_commands_and_bytes_wait_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "now", lambda: 1010.0)
    made = Quotas(2, 100, 60.0)
    made.check("alice", 10_000)  # alone
    made.add(_command(1, "alice"))
    made.add(_command(2, "bob", 95))
    made.add(_command(3, "alice"))
    with pytest.raises(Full, match="2 commands with 20 bytes of this tenant wait"):
        made.check("alice", 1)
    with pytest.raises(Full, match="and this one has 6; at most 2 and 100 bytes"):
        made.check("bob", 6)
    made.check("bob", 5)
    made.check("carol", 100)
    made.done("alice", 3)
    made.check("alice", 500)
    with pytest.raises(Full, match="1 commands with 95 bytes"):
        made.check("bob", 6)
    made.done("bob", 2)
    made.check("bob", 500)


def test_a_gateway_that_starts_again_counts_what_is_not_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "now", lambda: 1100.0)
    made = Quotas(1, 100, 60.0)
    made.done("alice", 2)
    made.add(_command(2, "alice", time=1100.0))
    made.add(_command(3, "bob", time=1000.0))  # its result is no longer kept
    made.check("alice", 10)
    made.check("bob", 10)
    made.add(_command(4, "alice", time=1090.0))
    with pytest.raises(Full, match="wait for results"):
        made.check("alice", 10)
