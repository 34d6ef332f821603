"""Ranks end one after the other: what rank 0 still does, and why it ends, is not lost because another was faster."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog

from support.programs.trainer.ending_ranks import SEAL_SECONDS
from support.programs.trainer.engine_actions import run_module
from trinity.config.schema.model import ClusterConfig
from trinity.runtime.errors import InvalidInput
from trinity.trainer import service
from trinity.trainer.data.source import Finish
from trinity.trainer.loop import TrainLoop
from trinity.trainer.process.control import Control
from trinity.trainer.process.ranks import Ranks
from trinity.trainer.publishing import NoVersions

pytestmark = pytest.mark.core

WORDS_SECONDS = 0.5
PROGRESS_SECONDS = 1.5
Run = Callable[[int | None, Callable[[Control], None]], None]


@pytest.mark.parametrize(("bad", "saved", "state"), [(False, 2, "finished"), (True, 1, "stopped")])
def test_no_rank_ends_before_the_last_checkpoint_is_on_the_disk(
    bad: bool, saved: int, state: str, tmp_path: Path
) -> None:
    """A large one takes minutes, and rank 0 takes the end of another rank for a failure."""
    assert SEAL_SECONDS > 1
    (tmp_path / "model").mkdir()
    if bad:
        (tmp_path / "bad").touch()
    run_module("support.programs.trainer.ending_ranks", tmp_path, 2, 60)
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [[[saved], state]] * 2


class Ended(Exception):
    """Instead of the end of this process."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Rank 1 ends with this code at once, or lives, while rank 0's loop does this."""

    def launch(ranks: Ranks, on_death: Callable[[int, int], None], hung_seconds: float) -> list[object]:
        if code is not None:
            threading.Timer(0.01, on_death, (1, code)).start()
        return []

    def end(code: int) -> None:
        raise Ended(code)

    code: int | None
    code, trains = 0, Control.stop

    def started(with_code: int | None, loop: Callable[[Control], None]) -> None:
        nonlocal code, trains
        code, trains = with_code, loop
        trainer = object.__new__(service.TrainerService)
        trainer.control, trainer.ranks = Control(), Ranks(0, 2, 0)
        trainer._settings = trainer._training = None  # type: ignore[assignment]
        cluster = ClusterConfig.model_construct(node_num=0, progress_timeout=PROGRESS_SECONDS)
        trainer._plan = SimpleNamespace(config=SimpleNamespace(cluster=cluster))  # type: ignore[assignment]
        asyncio.run(asyncio.wait_for(trainer.work(asyncio.Event(), ""), 30))

    monkeypatch.setattr(service, "_ERROR_SECONDS", WORDS_SECONDS)
    monkeypatch.setattr(service, "launch_others", launch)
    monkeypatch.setattr(service, "_exit_now", end)
    monkeypatch.setattr(service, "train", lambda plan, settings, ranks, control: trains(control))
    return started


class Versions(NoVersions):
    """The last one takes longer to publish than rank 0 has for its words."""

    def close(self) -> None:
        time.sleep(2 * WORDS_SECONDS)


class Parts:
    """A loop's, which ends at once, by an error if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def resume(self) -> tuple[int, int]:
        return 0, 0

    def open(self, step: int) -> None: ...

    def next(self, step: int) -> Finish:
        if self._error is not None:
            raise self._error
        return Finish()

    def settle(self) -> None:
        time.sleep(WORDS_SECONDS / 5)


def test_a_run_that_is_finished_waits_for_its_last_version(
    run: Run,
) -> None:
    run(0, lambda control: TrainLoop(control, Parts(), Parts(), Versions(), Parts()).run())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error", [InvalidInput("trainer.num_ranks", "is 2"), OSError(28, "no space")], ids=lambda e: type(e).__name__
)
def test_the_error_of_all_ranks_is_the_reason_also_while_a_version_is_published(error: Exception, run: Run) -> None:
    parts = Parts(error)
    with pytest.raises(type(error), match=str(error.args[-1])):
        run(1, lambda control: TrainLoop(control, parts, parts, Versions(), parts).run())  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [0, 1])
def test_a_rank_that_ends_within_a_step_ends_the_others(code: int, run: Run) -> None:
    hangs = threading.Event()
    with structlog.testing.capture_logs() as logs, pytest.raises(Ended, match="1"):
        try:
            run(code, lambda control: hangs.wait(20) and None)
        finally:
            hangs.set()
    assert logs[-1]["reason"] == f"rank 1 ended with code {code}; see its log"


def test_what_torch_says_of_a_lost_rank_is_not_the_only_reason(
    run: Run,
) -> None:
    def lose(control: Control) -> None:
        time.sleep(WORDS_SECONDS / 5)
        raise RuntimeError("Connection closed by peer")

    with structlog.testing.capture_logs() as logs, pytest.raises(Ended):
        run(-9, lose)
    expected = "rank 1 ended with code -9; see its log; rank 0 raised RuntimeError('Connection closed by peer')"
    assert logs[-1]["reason"] == expected


def test_a_step_that_stands_still_ends_ranks_that_all_live(run: Run) -> None:
    """Waits like a collective that the other ranks never enter; torch gives up after an hour."""
    hangs = threading.Event()

    def stand_still(control: Control) -> None:
        control.update(state="training")
        with control.together("step 7"):
            hangs.wait(20)

    with structlog.testing.capture_logs() as logs, pytest.raises(Ended, match="1"):
        try:
            run(None, stand_still)
        finally:
            hangs.set()
    assert logs[-1]["reason"] == "step 7 has stood still for 1.5 s (cluster.progress_timeout): a rank hangs"


def test_what_another_thread_does_moves_only_its_own_work() -> None:
    """A step goes on while a checkpoint hangs; what is made tensor by tensor counts from the newest one."""
    control, made = Control(), []
    with control.together("a checkpoint"):
        thread = threading.Thread(target=lambda: made.extend(control.each("a step", [1, 2])))
        thread.start()
        thread.join()
        assert made == [1, 2]
        for tensor in control.each("weights", "abc"):
            assert (control.look(3), control.look(3)) == ("", ""), tensor
        assert control.look(3) == "a checkpoint"
    assert control.look(1) == ""


def test_the_start_has_more_time_since_ranks_load_at_different_speed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(control: Control) -> None:
        with control.together("the rendezvous"):
            time.sleep(2 * PROGRESS_SECONDS)

    monkeypatch.setattr(service, "_LOAD_SECONDS", 4 * PROGRESS_SECONDS)
    run(None, load)
    monkeypatch.setattr(service, "_LOAD_SECONDS", 0.0)
    with structlog.testing.capture_logs() as logs, pytest.raises(Ended):
        run(None, load)
    assert logs[-1]["reason"].startswith("the rendezvous has stood still for 1.5 s")


def test_a_long_step_that_moves_and_a_wait_between_steps_are_no_hang(run: Run) -> None:
    def work(control: Control) -> None:
        control.update(state="training")
        with control.together("step 7"):
            for _ in range(6):
                time.sleep(PROGRESS_SECONDS / 2)
                control.moved()
        time.sleep(2 * PROGRESS_SECONDS)  # for a batch, or a slow disk

    run(None, work)
