"""Forward passes over all sequences of a batch, without gradients. Each rank computes its share; all get the result."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from trinity.trainer.algorithms.report import Report
from trinity.trainer.data.batch import TrainSequence
from trinity.trainer.data.microbatch import MicroBatch
from trinity.trainer.engine.splitting import MicroBatchPlanner
from trinity.trainer.process.ranks import Ranks


class NoGradForward:
    """Collectives: every rank calls them with the same sequences."""

    def __init__(self, planner: MicroBatchPlanner, ranks: Ranks, device: torch.device) -> None:
        self.planner = planner
        self._ranks = ranks
        self._device = device

    @property
    def ranks(self) -> int:
        return self._ranks.world_size

    @torch.no_grad()
    def tokens(
        self, sequences: Sequence[TrainSequence], model: Callable[[MicroBatch], torch.Tensor]
    ) -> list[np.ndarray]:
        """The model's value of each response token, float32 [R] for every sequence. `model` returns [B, R]."""
        if not sequences:
            return []
        ends = np.cumsum([sequence.response_length for sequence in sequences])
        flat = torch.zeros(int(ends[-1]), dtype=torch.float32, device=self._device)
        for indices, micro in self.planner.micro_batches(sequences):
            for part, found in self._of(indices, micro, sequences, model):
                for row, index in enumerate(part):
                    length, end = sequences[index].response_length, int(ends[index])
                    flat[end - length : end] = found[row, :length]
        if self._ranks.world_size > 1:
            dist.all_reduce(flat)
            flat /= self.planner.copies
        return np.split(flat.cpu().numpy(), ends[:-1])

    def _of(
        self,
        indices: list[int],
        micro: MicroBatch,
        sequences: Sequence[TrainSequence],
        model: Callable[[MicroBatch], torch.Tensor],
    ) -> Iterator[tuple[list[int], torch.Tensor]]:
        """The model's output for a micro-batch, with the indices of its rows; in halves if memory is not enough.

        Halving needs a single rank: others would have to do the same.
        """
        try:
            found = model(micro)
        except torch.OutOfMemoryError:
            if len(indices) < 2 or self._ranks.world_size > 1:
                raise
            found = None
        if found is not None:
            yield indices, found
            return
        middle = -(-len(indices) // 2)
        for half in (indices[:middle], indices[middle:]):
            yield half, model(self.planner.one([sequences[index] for index in half]))

    def total(self, report: Report) -> Report:
        """The sum over ranks."""
        if self._ranks.world_size == 1 or not report:
            return report
        names = sorted(report)
        stacked = torch.stack([report[name].double() for name in names])
        dist.all_reduce(stacked)
        return dict(zip(names, stacked, strict=True))

    def anywhere(self, happened: bool) -> bool:
        """Whether it happened on any rank."""
        if self._ranks.world_size == 1:
            return happened
        flag = torch.tensor(int(happened), device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)
