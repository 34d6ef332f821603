"""Sums of what tenants used are in files of their processes, and one reader adds them."""

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from trinity.tinker.commands import account
from trinity.tinker.commands.account import SAMPLE, Account

pytestmark = pytest.mark.core


async def test_sums_are_written_when_they_change_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account, "_WRITE_SECONDS", 0.01)
    made, path = Account(), account.path_of(tmp_path, "tenants")
    made.add("alice", "optim_step", 0.5)
    made.waiting["alice"] = 3
    keeping = asyncio.create_task(account.keep(made, path))
    async with asyncio.timeout(5):
        while not path.exists():
            await asyncio.sleep(0.01)
    written = path.stat().st_ino
    await asyncio.sleep(0.05)
    assert path.stat().st_ino == written, "nothing changed"
    made.add("alice", "optim_step", 1.0)
    made.add("bob", "optim_step", 2.0)
    keeping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keeping
    sampled, second = Account(), account.path_of(tmp_path, "sampler")
    sampled.add("alice", SAMPLE, 5.0, 4)
    second.write_text(json.dumps(vars(sampled)))
    found = account.read(path, second, tmp_path / "none")
    assert found.uses == {
        "alice": {"optim_step": {"requests": 2, "seconds": 1.5}, SAMPLE: {"requests": 4, "seconds": 5.0}},
        "bob": {"optim_step": {"requests": 1, "seconds": 2.0}},
    }
    assert found.waiting == {"alice": 3}


async def test_a_disk_that_takes_nothing_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "_WRITE_SECONDS", 0.01)
    (tmp_path / "accounts").touch()
    made = Account()
    made.add("alice", SAMPLE, 1.0)
    path = account.path_of(tmp_path, "sampler")
    keeping = asyncio.create_task(account.keep(made, path))
    await asyncio.sleep(0.05)
    assert not keeping.done()
    (tmp_path / "accounts").unlink()
    async with asyncio.timeout(5):
        while not account.read(path).uses:
            await asyncio.sleep(0.01)
    keeping.cancel()
