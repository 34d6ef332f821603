"""A spent budget ends the run after a checkpoint; a second signal ends it at once."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trinity.cli.supervise.processes.devices import Placement
from trinity.cli.supervise.stage.stage import EXIT_SPENT, Stage
from trinity.config import Config, make_plan
from trinity.reading.accounts.budget import Budget
from trinity.reading.ending import Ending
from trinity.reading.errors import RunError
from trinity.reading.nats import NatsAccess

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("saved", "at_once", "said"),
    [
        (7, False, "a checkpoint of step 7 is saved"),
        (0, False, "no step was trained"),
        (None, False, "the trainer saved no checkpoint; the newest one counts"),
        (None, True, "ended at once, without a checkpoint of the newest steps"),
    ],
)
async def test_the_end_says_what_was_saved(
    saved: int | None, at_once: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Budget, "is_spent", lambda _: True)
    config = Config.model_validate({"checkpoint_root_dir": str(tmp_path), "budget": {"gpu_hours": 1}})
    job: Any = SimpleNamespace(folder=tmp_path)
    screen: Any = SimpleNamespace(say=lambda _: None)
    nats, placement = NatsAccess("nats://127.0.0.1:1"), Placement("cpu", [], [], 1)
    stage = Stage(job, make_plan(config), nats, placement, screen, 1)
    ending = Ending()

    async def save_checkpoint(wait_seconds: float) -> int | None:
        if at_once:
            asyncio.get_running_loop().call_soon(ending.at_once.set)
            await asyncio.sleep(wait_seconds)
        return saved

    watcher: Any = SimpleNamespace(save_checkpoint=save_checkpoint)
    async with asyncio.timeout(10):
        with pytest.raises(RunError, match=said) as ended:
            await stage._end_if_spent(watcher, ending)
    assert ended.value.code == EXIT_SPENT
