"""An explorer that has lost its sync service says so on the screen, and ends after a limit."""

from typing import Any

import pytest
import structlog

from trinity.explorer.weights import member
from trinity.explorer.weights.member import SyncMember
from trinity.runtime import waits
from trinity.runtime.errors import Unavailable
from trinity.runtime.process import free_port
from trinity.weights.client import Membership

pytestmark = pytest.mark.core


async def test_it_is_named_and_the_explorer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_TELL_SECONDS", 0.05)
    monkeypatch.setattr(member, "_RETRY_SECONDS", 0.05)
    unused: Any = None
    address = f"127.0.0.1:{free_port()}"
    membership = Membership("run", "e", "127.0.0.1:1", "model", "float32", 1, 1, ("folder",), "")
    lost = SyncMember(address, membership, unused, unused)
    lost._absence = waits.Absence(f"the sync service at {address}", 0.5)

    async def refuse(*_: Any, **__: Any) -> None:
        raise Unavailable("nobody answers")

    monkeypatch.setattr(lost._sync, "ask", refuse)
    with (
        structlog.testing.capture_logs() as lines,
        pytest.raises(Unavailable, match=f"{address} was away for 0.5 s: nobody answers"),
    ):
        await lost.run()
    said = [line for line in lines if line["event"] == waits.WAITS]
    assert [line["whom"] for line in said] == [f"the sync service at {address}"]
