"""The trainer of a replay: what is asked of it meanwhile, and what its failure says."""

from pathlib import Path
from typing import Any

import pytest

from trinity.lineage import replay
from trinity.reading.errors import RunError

pytestmark = pytest.mark.core


class Trainer:
    """Runs for three looks."""

    process = None
    log_file = Path("trainer.log")

    def __init__(self, finishes: bool) -> None:
        self.looks, self.ended, self._finishes = 0, False, finishes

    def start(self) -> None:
        self.looks = 3

    def is_running(self) -> bool:
        self.looks -= 1
        return self.looks > 0

    def has_finished(self) -> bool:
        return self._finishes

    def last_error(self) -> str:
        return "no memory"

    def drop_spare(self) -> None:
        """It has none."""

    def end_group(self, signum: int) -> None:
        self.ended = True


@pytest.mark.parametrize("finishes", [True, False])
async def test_each_look_is_told_and_the_trainer_is_ended(finishes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_POLL_SECONDS", 0.0)
    trainer: Any = Trainer(finishes)
    looks: list[int] = []
    if finishes:
        await replay.run_to_end(trainer, lambda: looks.append(trainer.looks))
    else:
        with pytest.raises(RunError, match=r"the replay failed: no memory \(see trainer.log\)"):
            await replay.run_to_end(trainer, lambda: looks.append(trainer.looks))
    assert looks == [2, 1, 0], "once more after its end"
    assert trainer.ended
