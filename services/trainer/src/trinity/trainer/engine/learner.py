"""Makes one update of a model: gradients of micro-batches add up to the gradient of the mini-batch, then one step.

A non-finite update leaves the weights unchanged and raises NotFinite.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import structlog
import torch
import torch.distributed as dist

from trinity.config.schema.algorithm import OptimizerConfig
from trinity.trainer.algorithms.aggregation import Report, join
from trinity.trainer.data.bad_steps import NotFinite, OutOfMemory, OutOfMemoryAlone
from trinity.trainer.data.batch import TrainBatch, TrainSequence
from trinity.trainer.data.microbatch import MicroBatch, MicroBatchPlanner
from trinity.trainer.engine.deepspeed import DeepSpeedModel
from trinity.trainer.process.ranks import Ranks

log = structlog.get_logger(__name__)

# The sequences of a micro-batch and the micro-batch -> its share of the loss, and its report.
LossOf = Callable[[Sequence[TrainSequence], MicroBatch], tuple[torch.Tensor, Report]]


class NoGradForward:
    """Forward passes over all sequences of a batch: each rank computes its share, and all get the result.

    All methods are collectives: every rank passes the same sequences.
    """

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
        """Computes a value of each response token, float32 [R] for every sequence. `model` returns [B, R]."""
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
        """Yields the model's output for a micro-batch with the indices of its rows; in halves if memory runs out.

        Several ranks never halve, since all would have to.
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
        """Sums a report over ranks."""
        if self._ranks.world_size == 1 or not report:
            return report
        names = sorted(report)
        stacked = torch.stack([report[name].double() for name in names])
        dist.all_reduce(stacked)
        return dict(zip(names, stacked, strict=True))

    def anywhere(self, happened: bool) -> bool:
        """Returns True if it happened on any rank."""
        if self._ranks.world_size == 1:
            return happened
        flag = torch.tensor(int(happened), device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


def _one(value: float) -> torch.Tensor:
    """Returns a report's entry for one update."""
    return torch.tensor([value, 1.0], dtype=torch.float64)


class Learner:
    """Trains a model from shares of its loss. `name` prefixes errors and metrics; empty for the policy."""

    def __init__(self, model: DeepSpeedModel, no_grad: NoGradForward, name: str = "") -> None:
        self.model = model
        self._no_grad = no_grad
        self._prefix = f"{name}/" if name else ""
        self._subject = f"{name}'s " if name else ""

    def update(self, batch: TrainBatch, rate: float, loss_of: LossOf) -> Report:
        """Makes one update from the batch; returns its report over all ranks, empty if no token is to be trained.

        Raises NotFinite or OutOfMemory with unchanged weights. OutOfMemoryAlone ends the trainer.
        """
        if not batch.totals.tokens:
            return {}
        self.model.engine.train()
        report = self._no_grad.total(self._gradient(batch, loss_of))
        # Read after the update, which the guard skips if needed: reading it here would wait for the GPU.
        sound = torch.isfinite(report.pop("loss")).all()
        norm = self.model.step(rate, sound)
        if not sound:
            raise NotFinite(f"{self._subject}loss", batch.step)
        if norm is not None and not math.isfinite(norm):
            raise NotFinite(f"norm of the {self._subject}gradient", batch.step)
        if norm is not None:
            report[f"{self._prefix}grad_norm"] = _one(norm)
        report[f"{self._prefix}lr"] = _one(rate)
        return report

    def _gradient(self, batch: TrainBatch, loss_of: LossOf) -> Report:
        """Accumulates the gradient of all micro-batches; retries once with halved micro-batches if memory runs out."""
        whole = self._no_grad.planner.micro_batches(batch.sequences)
        found, problem = None, ""
        try:
            found = self._accumulate(batch, whole, loss_of)
        except torch.OutOfMemoryError as error:
            problem = str(error)  # the error's traceback references the tensors
            if self._others_wait:
                raise OutOfMemoryAlone(too_large(batch, problem)) from None
        if not self._no_grad.anywhere(found is None):
            assert found is not None
            return found
        del whole
        self.model.abandon()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        lengths = [sequence.length for sequence in batch.sequences]
        log.warning(
            "trainer.step.out_of_memory", step=batch.step, problem=problem, sequences=len(lengths),
            groups=sorted({s.group for s in batch.sequences}), longest=max(lengths), tokens=sum(lengths),
        )  # fmt: skip
        try:
            found = self._accumulate(batch, self._halves(batch), loss_of)
        except torch.OutOfMemoryError as error:
            found, problem = None, str(error)
        if not self._no_grad.anywhere(found is None):
            assert found is not None
            return found
        self.model.abandon()
        raise too_large(batch, problem or "on another rank")

    def _accumulate(
        self, batch: TrainBatch, micro_batches: Iterator[tuple[list[int], MicroBatch]], loss_of: LossOf
    ) -> Report:
        """Accumulates the gradient of micro-batches. Raises torch.OutOfMemoryError naming the micro-batch."""
        reports = []
        for indices, micro in micro_batches:
            try:
                loss, report = loss_of([batch.sequences[index] for index in indices], micro)
                self.model.backward(loss)
            except torch.OutOfMemoryError as error:
                size = f"{sum(micro.lengths)} tokens in {len(indices)} sequence(s)"
                raise torch.OutOfMemoryError(f"a micro-batch of {size}: {error}") from error
            reports.append(
                report | {"loss": torch.stack([loss.detach().float(), loss.new_ones((), dtype=torch.float)])}
            )
        return join(reports)

    def _halves(self, batch: TrainBatch) -> Iterator[tuple[list[int], MicroBatch]]:
        """Yields each micro-batch in two halves. The second may be empty: every rank needs the same number."""
        planner = self._no_grad.planner
        for indices, _ in planner.micro_batches(batch.sequences):
            middle = -(-len(indices) // 2)
            for half in (indices[:middle], indices[middle:]):
                yield half, planner.one([batch.sequences[index] for index in half])

    @property
    def _others_wait(self) -> bool:
        """True if other ranks wait in a collective for this one: under ZeRO 2 and 3, and with shared sequences."""
        return self._no_grad.ranks > 1 and (self.model.zero_stage > 1 or self._no_grad.planner.copies > 1)


def learning_rate(config: OptimizerConfig, step: int, last_step: int) -> float:
    """Rate of step `step` (from 1) of `last_step`: linear warm-up, then constant, or falling to min_lr_ratio.

    It depends on no earlier step, so a resumed run has no scheduler state to lose.
    """
    warmup = config.lr_warmup_steps if config.lr_warmup_steps >= 0 else int(config.lr_warmup_steps_ratio * last_step)
    if step <= warmup:
        return config.lr * step / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, last_step - warmup))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if config.lr_scheduler_type == "cosine" else 1 - progress
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def too_large(batch: TrainBatch, problem: str) -> OutOfMemory:
    """Returns the error of a batch for which memory is not enough."""
    longest = max(batch.sequences, key=lambda sequence: sequence.length)
    return OutOfMemory(
        f"memory is not enough for {len(batch.sequences)} sequences, the longest of {longest.length} tokens: {problem}"
        f". Lower trainer.max_token_len_per_gpu or the model's lengths, set trainer.gradient_checkpointing to true, "
        f"or make room with trainer.deepspeed.zero_stage 3 or offload_optimizer",
        batch.step,
        [longest.group],
    )


@contextmanager
def memory_for(batch: TrainBatch, ranks: int) -> Iterator[None]:
    """Makes an out-of-memory error of passes without training name the batch."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        problem = too_large(batch, str(error))
        raise problem if ranks == 1 else OutOfMemoryAlone(problem) from None
