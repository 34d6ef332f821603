"""Sharing out, schedules, and checkpoints that are whole or not there."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.config.schema.algorithm import OptimizerConfig
from trinity.trainer.checkpoints import CheckpointStore, TrainerState
from trinity.trainer.microbatch import plan_micro_batches
from trinity.trainer.schedule import learning_rate


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60),
    ranks=st.integers(1, 5),
    budget=st.integers(1, 1000),
)
def test_every_sequence_once_and_ranks_in_step(lengths: list[int], ranks: int, budget: int) -> None:
    plan = plan_micro_batches(lengths, ranks, budget)
    assert len(plan) == ranks
    assert len({len(batches) for batches in plan}) == 1
    assert sorted(i for batches in plan for batch in batches for i in batch) == list(range(len(lengths)))
    for batches in plan:
        for batch in batches:
            assert len(batch) <= 1 or len(batch) * max(lengths[i] for i in batch) <= budget
    loads = [sum(lengths[i] for batch in batches for i in batch) for batches in plan]
    assert max(loads) - min(loads) <= max(lengths)


@pytest.mark.parametrize(
    ("config", "rates"),
    [
        ({"lr": 1.0}, [1, 1, 1, 1]),
        ({"lr": 1.0, "lr_warmup_steps": 2}, [0.5, 1, 1, 1]),
        ({"lr": 1.0, "lr_warmup_steps_ratio": 0.5}, [0.5, 1, 1, 1]),
        ({"lr": 1.0, "lr_warmup_steps": 1, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.2}, [1, 0.8, 0.4, 0.2]),
    ],
)
def test_learning_rates(config: dict[str, object], rates: list[float]) -> None:
    found = [learning_rate(OptimizerConfig(**config), step, 4) for step in (1, 2, 3, 4)]
    assert found == pytest.approx(rates)


def _write(store: CheckpointStore, step: int, keep: int | None = None) -> int:
    store.begin(step)
    (store.temporary(step) / "actor/weights").write_text(str(step))
    return store.finish(TrainerState("run", step, 10 * step, 1, 2), keep)


def test_the_newest_whole_one_is_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.newest() is None
    for step in (5, 10):
        _write(store, step)
    store.begin(15)  # a crash comes before `finish`
    (store.temporary(15) / "actor/weights").write_text("half")
    newest = store.newest()
    assert newest is not None
    assert (newest.step, newest.tokens_trained) == (10, 100)
    (store.path(10) / ".full_checkpoint").unlink()
    newest = store.newest()
    assert newest is not None
    assert newest.step == 5
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"


def test_only_so_many_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert [_write(store, step, keep=2) for step in (1, 2, 3, 4)] == [1, 1, 2, 3]
    assert store.steps() == [3, 4]


def test_what_a_crash_left_is_cleared_away(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.begin(1)
    (store.temporary(1) / "actor/rubbish").write_text("x")
    _write(store, 1)
    assert not (store.path(1) / "actor/rubbish").exists()
