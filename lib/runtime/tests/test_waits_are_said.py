"""A process that waits for another one says for whom and why, and what it does while it starts."""

import time
from typing import Any

import pytest
import structlog

from trinity.runtime import broker, waits
from trinity.runtime.errors import Unavailable

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_TELL_SECONDS", 0.05)


def test_a_short_wait_says_nothing() -> None:
    with structlog.testing.capture_logs() as lines, waits.waiting("the hub"):
        pass
    time.sleep(0.1)
    assert lines == []


def test_a_long_wait_is_logged_with_its_reason_and_its_end() -> None:
    reason = "not yet asked"
    with structlog.testing.capture_logs() as lines, waits.waiting("ranks 1 to 3", lambda: reason, limit_seconds=60):
        reason = "rendezvous at h:1"
        time.sleep(0.2)
    assert [line["event"] for line in lines] == [waits.WAITS, waits.WENT_ON]
    told = [lines[0][name] for name in ("whom", "reason", "limit_seconds")]
    assert told == ["ranks 1 to 3", "rendezvous at h:1", 60]


def test_a_command_says_it_on_its_screen() -> None:
    said: list[str] = []
    with waits.waiting("the hub", "no answer", limit_seconds=9, say=said.append):
        time.sleep(0.2)
    assert said == ["waits for the hub (no answer); gives up after 9 s"]


async def test_nats_that_does_not_answer_is_named() -> None:
    with structlog.testing.capture_logs() as lines, pytest.raises(Unavailable):
        await broker.connect("nats://127.0.0.1:1", "test", wait_seconds=0.3)
    said: list[Any] = [line for line in lines if line["event"] == waits.WAITS]
    assert [line["whom"] for line in said] == ["NATS at nats://127.0.0.1:1"]
    assert "refused" in said[0]["reason"] or "Connect" in said[0]["reason"]


def test_an_absence_is_said_once_and_ends_at_its_limit() -> None:
    absence = waits.Absence("the sync service at s:1", limit_seconds=0.4)
    with structlog.testing.capture_logs() as lines:
        absence.lost("refused")
        absence.lost("still refused")
        time.sleep(0.15)
        absence.found()
        absence.lost("again")  # the time begins anew
        time.sleep(0.2)
        absence.lost("again")
        time.sleep(0.3)
        with pytest.raises(Unavailable, match=r"the sync service at s:1 was away for 0.4 s: no answer"):
            absence.lost("no answer")
    assert [line["event"] for line in lines] == [waits.WAITS, waits.WENT_ON] * 2
    assert [lines[0][name] for name in ("whom", "reason", "limit_seconds")] == [
        "the sync service at s:1", "still refused", 0.4
    ]  # fmt: skip
