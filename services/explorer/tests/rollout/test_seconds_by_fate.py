"""The account of an explorer: attempts that run together share each second, and all shares add up."""

import asyncio
import json
from pathlib import Path

import pytest

from support.fakes.data.experience import make_group, make_task
from trinity.data.experience import AttemptFailure, TaskKind
from trinity.explorer.rollout.account import Account, fate_of, keep
from trinity.runtime.errors import FailureCause

pytestmark = pytest.mark.core


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_attempts_share_the_seconds_by_their_rollouts() -> None:
    clock = Clock()
    account = Account(clock)
    one, eight = make_task(1, repeat_times=1), make_task(2, repeat_times=8)
    small, large = account.attempt(one), account.attempt(eight)
    clock.now = 5.0  # nothing runs
    account.enter(small)
    clock.now = 7.0
    account.enter(large)
    clock.now = 16.0
    account.leave(small)
    small.fate = "stored"
    account.end(small)
    assert account.seconds == {"stored": pytest.approx(2.0 + 1.0)}
    clock.now = 18.0
    assert account.running_seconds() == pytest.approx(8.0 + 2.0)
    account.leave(large)
    clock.now = 30.0  # it waits for a provider
    account.enter(large)
    clock.now = 31.0
    account.leave(large)
    account.end(large)
    assert account.seconds == {"stored": pytest.approx(3.0), "aborted": pytest.approx(11.0)}
    assert account.running_seconds() == 0.0


@pytest.mark.parametrize(
    ("kind", "final", "fate"),
    [
        (TaskKind.TRAIN, True, "dead_letter"),
        (TaskKind.TRAIN, False, "failed"),
        (TaskKind.EVALUATION, None, "evaluated"),
    ],
)
def test_each_outcome_has_its_fate(kind: TaskKind, final: bool | None, fate: str) -> None:
    task = make_task(kind=kind)
    failure = AttemptFailure(task, 1, "one", FailureCause.TIMEOUT, "late", bool(final), 0.0)
    assert fate_of(task, make_group(task) if final is None else failure) == fate


async def test_the_file_is_written_at_once_and_at_the_end_and_a_disk_that_refuses_ends_nothing(tmp_path: Path) -> None:
    account = Account(Clock())
    keeping = asyncio.create_task(keep(account, tmp_path / "devices", "one"))
    await asyncio.sleep(0)
    (path,) = (tmp_path / "devices").iterdir()
    account.seconds["stored"] = 3.0
    keeping.cancel()
    await asyncio.wait([keeping])
    assert json.loads(path.read_text())["seconds"] == {"stored": 3.0}

    (tmp_path / "file").touch()
    refused = asyncio.create_task(keep(account, tmp_path / "file", "one"))
    await asyncio.sleep(0)
    assert not refused.done()
    refused.cancel()
    await asyncio.wait([refused])
    assert refused.cancelled()
