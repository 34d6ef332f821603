"""A new version answers its share of the calls, beside the version before it, until it is tried or turns out wrong."""

import time
from pathlib import Path
from typing import Any

import pytest

from trinity.config.schema.explorer import TrialConfig
from trinity.explorer.engine.adapters import HeldAdapters
from trinity.explorer.engine.trial import BEFORE, POLICY, Trial
from trinity.explorer.weights.load_history import LoadHistory

pytestmark = pytest.mark.core


class Vllm:
    """Has the adapters that it was given."""

    def __init__(self) -> None:
        self.has: set[int] = set()

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[bool]:
        return [True]

    async def add_lora(self, request: Any) -> bool:
        self.has.add(request.lora_int_id)
        return True

    async def remove_lora(self, number: int) -> bool:
        self.has.discard(number)
        return True


class Explorer:
    """One engine's adapters, and what is known of its loads."""

    def __init__(self, folder: Path, **trial: Any) -> None:
        self.vllm, self.loads, self.folder = Vllm(), LoadHistory(), folder
        self.adapters = HeldAdapters(self.vllm, 3)
        self.trial = Trial(TrialConfig(**trial), self.loads)

    async def load(self, version: int, good: bool = True) -> None:
        serial = self.loads.begin(version)
        await self.adapters.load(POLICY, self.folder if version else None, serial, BEFORE)
        if good:
            self.loads.trust(serial)

    def calls(self, count: int) -> list[int]:
        """The versions that sample so many calls."""
        serials = (self.adapters.serial(self.trial.choose(self.adapters)) for _ in range(count))
        return [self.loads.version(serial) for serial in serials if serial is not None]


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
async def test_a_new_version_answers_its_share_and_after_its_calls_all(tmp_path: Path, share: float) -> None:
    explorer = Explorer(tmp_path, share=share, calls=20)
    assert explorer.calls(5) == [0] * 5 and not explorer.trial.is_on(explorer.adapters)
    await explorer.load(4)
    total = round(19 / share)
    found = explorer.calls(total)
    assert found[0] == 4 and set(found) == {0, 4}
    for end in range(1, total + 1):
        assert abs(found[:end].count(4) - share * end) <= 1, "at any time"
    assert found.count(4) == 19 and explorer.trial.is_on(explorer.adapters)
    assert explorer.calls(1) == [4] and not explorer.trial.is_on(explorer.adapters)
    assert explorer.calls(50) == [4] * 50
    await explorer.load(9)
    assert set(explorer.calls(total)) == {4, 9}, "the next version is tried against this one"
    assert len(explorer.vllm.has) == 2


async def test_a_trial_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = Explorer(tmp_path, share=0.1, calls=1000, seconds=60)
    await explorer.load(1)
    assert explorer.trial.is_on(explorer.adapters)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 59)
    assert set(explorer.calls(20)) == {0, 1}
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert explorer.calls(20) == [1] * 20


async def test_a_version_that_is_wrong_or_withdrawn_gets_no_calls_once_the_one_before_is_back(tmp_path: Path) -> None:
    explorer = Explorer(tmp_path, share=0.5, calls=1000)
    await explorer.load(1)
    explorer.loads.verify(1)
    await explorer.load(2, good=False)
    assert set(explorer.calls(10)) == {1, 2}, "its calls wait for its canary"
    explorer.loads.reject([2], "was withdrawn")
    assert not explorer.trial.is_on(explorer.adapters), "newer versions, and the one before, may be loaded at once"
    await explorer.load(1)
    assert explorer.calls(10) == [1] * 10
    await explorer.load(0)
    assert explorer.calls(10) == [0] * 10, "an older version is not tried"
    await explorer.load(3)
    assert set(explorer.calls(10)) == {0, 3}


async def test_running_calls_keep_the_version_with_which_they_began(tmp_path: Path) -> None:
    explorer = Explorer(tmp_path, share=0.5, calls=1000)
    await explorer.load(1)
    await explorer.load(2)
    async with explorer.adapters.use(BEFORE) as held:
        await explorer.load(3)
        assert held.request.lora_int_id in explorer.vllm.has, "version 1 leaves after its last call"
        assert len(explorer.vllm.has) == 3
    await explorer.load(4)
    assert len(explorer.vllm.has) == 2
