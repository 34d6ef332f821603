"""Micro-batch plans, schedules, and checkpoints that are complete or absent."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trinity.config.schema.algorithm import OptimizerConfig
from trinity.trainer.data.batch import TrainSequence
from trinity.trainer.data.microbatch import Limit, collate, plan_micro_batches
from trinity.trainer.engine.checkpoint_store import CheckpointStore, TrainerState
from trinity.trainer.engine.learner import learning_rate

pytestmark = pytest.mark.core

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


def tokens_of(batch: list[int], lengths: list[int], packed: bool) -> int:
    """What a micro-batch takes up, padding included."""
    return sum(lengths[i] for i in batch) if packed else len(batch) * max(lengths[i] for i in batch)


@given(lengths=LENGTHS, ranks=st.integers(1, 5), tokens=st.integers(1, 1000), packed=st.booleans())
def test_every_sequence_once_and_ranks_in_step(lengths: list[int], ranks: int, tokens: int, packed: bool) -> None:
    plan = plan_micro_batches(lengths, ranks, Limit(tokens, packed))
    assert len(plan) == ranks
    assert len({len(batches) for batches in plan}) == 1
    assert sorted(i for batches in plan for batch in batches for i in batch) == list(range(len(lengths)))
    for batches in plan:
        for batch in batches:
            assert len(batch) <= 1 or tokens_of(batch, lengths, packed) <= tokens
    loads = [sum(lengths[i] for batch in batches for i in batch) for batches in plan]
    assert max(loads) - min(loads) <= max(lengths)


@given(lengths=LENGTHS, ranks=st.integers(1, 5), rows=st.integers(1, 9))
def test_so_many_rows_in_the_order_of_the_batch(lengths: list[int], ranks: int, rows: int) -> None:
    plan = plan_micro_batches(lengths, ranks, Limit(1, False, rows))
    assert len({len(batches) for batches in plan}) == 1
    assert sorted(i for batches in plan for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(batch) <= rows and batch == sorted(batch) for batches in plan for batch in batches)
    shares = [sum(len(batch) for batch in batches) for batches in plan]
    assert max(shares) - min(shares) <= 1


def test_packed_micro_batches_are_few_and_alike() -> None:
    lengths = [900, 800, 700, 600, 500, 400, 300, 200, 100, 100]
    plan = plan_micro_batches(lengths, 2, Limit(1200, packed=True))
    loads = [[sum(lengths[i] for i in batch) for batch in batches] for batches in plan]
    assert [len(of_rank) for of_rank in loads] == [2, 2]
    assert all(1100 <= load <= 1200 for of_rank in loads for load in of_rank)


@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=8), parts=st.integers(1, 4))
def test_parts_of_a_row_are_alike_and_predict_everything_once(lengths: list[int], parts: int) -> None:
    rng = np.random.default_rng(len(lengths))
    sequences = []
    for length in lengths:
        response = int(rng.integers(0, length))
        nothing = np.zeros(response, np.float32)
        sequences.append(TrainSequence(rng.integers(1, 99, length), length - response, nothing, nothing == 0, group=0))
    whole = collate(sequences, 0, packed=True)
    pieces = [whole.part(index, parts) for index in range(parts)]
    assert len({piece.input_ids.shape for piece in pieces}) == 1
    assert sum(pieces[0].lengths) == pieces[0].boundaries[-1] == sum(piece.input_ids.numel() for piece in pieces)
    assert torch.equal(sum(p.spread(p.targets.float()) for p in pieces), whole.spread(whole.targets.float()))
    flat = torch.cat([piece.input_ids for piece in pieces], dim=1)[0]
    size = pieces[0].input_ids.shape[1]
    for index, piece in enumerate(pieces):
        assert torch.equal(flat[piece.predicting + index * size + 1], piece.targets)


@pytest.mark.parametrize(
    ("config", "rates"),
    [
        ({"lr": 1.0}, [1, 1, 1, 1]),
        ({"lr": 1.0, "lr_warmup_steps": 2}, [0.5, 1, 1, 1]),
        ({"lr": 1.0, "lr_warmup_steps_ratio": 0.5}, [0.5, 1, 1, 1]),
        ({"lr": 1.0, "lr_warmup_steps": 1, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.2}, [1, 0.8, 0.4, 0.2]),
        ({"lr": 1.0, "lr_warmup_steps": 1, "lr_scheduler_type": "linear", "min_lr_ratio": 0.4}, [1, 0.8, 0.6, 0.4]),
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
