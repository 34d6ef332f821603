"""If one rank runs out of memory, all ranks retry the step together where possible; otherwise the trainer ends."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from support.programs.trainer.training import fixed_batch
from trinity.trainer.algorithms.aggregation import Report
from trinity.trainer.data.bad_steps import BadStep, OutOfMemory, OutOfMemoryAlone
from trinity.trainer.data.batch import TrainSequence
from trinity.trainer.data.microbatch import MicroBatch, collate
from trinity.trainer.engine.learner import Learner, memory_for

pytestmark = pytest.mark.core


class MicroBatchPlanner:
    """This rank's: two micro-batches of a batch's first eight sequences."""

    copies = 1

    def micro_batches(self, sequences: Sequence[TrainSequence]) -> Iterator[tuple[list[int], MicroBatch]]:
        for indices in ([0, 1, 2, 3], [4, 5, 6, 7]):
            yield indices, self.one([sequences[index] for index in indices])

    def one(self, sequences: Sequence[TrainSequence]) -> MicroBatch:
        return collate(sequences, 0, packed=True)


class NoGradForward:
    """Of this rank among `ranks`; `elsewhere` says, question by question, whether another one was short of memory."""

    def __init__(self, ranks: int, elsewhere: Sequence[bool] = ()) -> None:
        self.ranks, self.planner = ranks, MicroBatchPlanner()
        self._elsewhere = iter(elsewhere)

    def anywhere(self, happened: bool) -> bool:
        return next(self._elsewhere, False) or happened

    def total(self, report: Report) -> Report:
        return report


class Model:
    """Counts what is asked of it."""

    def __init__(self, zero_stage: int) -> None:
        self.zero_stage = zero_stage
        self.engine = torch.nn.Module()
        self.backwards = self.abandoned = self.steps = 0

    def backward(self, loss: torch.Tensor) -> None:
        self.backwards += 1

    def abandon(self) -> None:
        self.abandoned += 1

    def step(self, rate: float, sound: torch.Tensor) -> float:
        self.steps += 1
        return 1.0


def learner_of(zero_stage: int, no_grad: NoGradForward) -> tuple[Learner, Model]:
    model = Model(zero_stage)
    made: Any = Learner(model, no_grad)  # type: ignore[arg-type]
    return made, model


def loss_with(failures: int) -> Any:
    """A loss that runs out of memory this many times."""
    left = [failures]

    def loss_of(sequences: Sequence[TrainSequence], micro: MicroBatch) -> tuple[torch.Tensor, Report]:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("tried to allocate 9.30 GiB")
        return torch.zeros(()), {}

    return loss_of


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_rank_that_others_wait_for_ends_the_trainer_and_names_the_batch(zero_stage: int) -> None:
    learner, model = learner_of(zero_stage, NoGradForward(2))
    with pytest.raises(OutOfMemoryAlone) as ended:
        learner.update(fixed_batch(3), 0.1, loss_with(1))
    assert ended.value.for_good
    assert not isinstance(ended.value, BadStep), "it can be neither skipped nor saved before: both are exchanges"
    said = str(ended.value)
    assert said.startswith("step 3: memory is not enough for 16 sequences, the longest of ")
    assert "in 4 sequence(s): tried to allocate 9.30 GiB" in said
    assert "the other ranks wait for this one" in said
    assert (model.abandoned, model.steps) == (0, 0)


@pytest.mark.parametrize("own", [0, 1])
def test_all_ranks_try_again_if_one_had_no_memory(own: int) -> None:
    learner, model = learner_of(1, NoGradForward(2, [True, False]))
    learner.update(fixed_batch(1), 0.1, loss_with(own))
    first = 2 if own == 0 else 0
    assert model.backwards == first + 4, "two micro-batches, then four halves"
    assert (model.abandoned, model.steps) == (1, 1)


def test_all_ranks_give_up_together() -> None:
    learner, model = learner_of(1, NoGradForward(2, [True, True]))
    with pytest.raises(OutOfMemory, match="on another rank"):
        learner.update(fixed_batch(1), 0.1, loss_with(0))
    assert (model.abandoned, model.steps) == (2, 0)


def test_memory_that_runs_out_before_an_update_names_the_batch() -> None:
    for ranks, kind in ((1, OutOfMemory), (2, OutOfMemoryAlone)):
        with pytest.raises(kind, match="memory is not enough for 16 sequences"), memory_for(fixed_batch(1), ranks):
            raise torch.OutOfMemoryError("tried to allocate 9.30 GiB")
