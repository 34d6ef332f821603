"""Random batches for policy losses, and how a loss and the loop in plain floats that it is held against are evaluated.

A loop gets `lp`, the log-probabilities that are differentiated, and `sg`, the same numbers behind a stop-gradient; its
gradient is taken by differences.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trinity.trainer.algorithms.aggregation import CLIPPED, Share, Totals
from trinity.trainer.algorithms.inputs import LossInputs, WholeBatch
from trinity.trainer.algorithms.policy_losses import POLICY_LOSSES

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LIMIT = 8  # max_response_tokens of the run
OF_TOP = 0.1  # slope of the policy's log-probabilities of a teacher's tokens, by that of the place's token
Rows = list[list[float]]


@dataclass(frozen=True)
class Case:
    """A batch, as tensors, and as lists of only the trained tokens."""

    x: LossInputs
    totals: Totals
    mode: str
    groups: list[int]
    numbers: list[int]  # preference pairs: k, -k or 0

    def rows(self, name: str) -> Rows:
        values, mask = getattr(self.x, name).detach(), self.x.mask
        return [
            [float(v) for v, m in zip(row, flags, strict=True) if m] for row, flags in zip(values, mask, strict=True)
        ]

    def mean(self, losses: Rows, mode: str | None = None, among: list[bool] | None = None) -> float:
        """Aggregation, as its documentation says; `among` some of the sequences."""
        chosen = [row for index, row in enumerate(losses) if among is None or among[index]]
        mode, sequences = mode or self.mode, sum(bool(row) for row in chosen)
        if mode == "token-mean":
            return sum(map(sum, chosen)) / max(sum(map(len, chosen)), 1)
        if mode == "seq-mean-token-sum":
            return sum(map(sum, chosen)) / max(sequences, 1)
        if mode == "seq-mean-token-mean":
            return sum(sum(row) / len(row) for row in chosen if row) / max(sequences, 1)
        return sum(map(sum, chosen)) / (LIMIT * max(sequences, 1))


def case_of(seed: int, mode: str, dtype: torch.dtype = torch.float64, constant: bool = False) -> Case:
    """Ratios mostly near 1, some far; the last sequence is an expert's; prompts and padding hold numbers too."""
    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(2, 7)), int(rng.integers(1, 7))
    old = -rng.exponential(1.0, (rows, width))
    new = np.minimum(old + rng.normal(0, rng.choice([0.02, 0.3, 1.0]), (rows, width)), -1e-3)
    advantages = rng.normal(0, 1.5, (rows, 1)).repeat(width, 1)
    if not constant:
        advantages = advantages + rng.normal(0, 0.2, (rows, width))
    mask = rng.random((rows, width)) < 0.75
    mask[rng.integers(rows)] &= rng.random() < 0.5
    expert = np.zeros(rows)
    expert[-1] = 1
    groups = [int(g) for g in rng.integers(0, 3, rows)]
    numbers = [k * s for k in range(1, rows // 2 + 1) for s in (1, -1)] + [0] * (rows % 2)
    # numbers that float32 has too, so that both dtypes are on the same side of every clip
    made = [torch.tensor(a.astype(np.float32)).to(dtype) for a in (new, old, advantages, new * 0.9 - 0.05)]
    flags = torch.tensor(mask).to(dtype)
    own, teacher = (_top(np.random.default_rng([seed, number]), flags) for number in range(2))
    x = LossInputs(
        logprobs=made[0].requires_grad_(),
        entropy=torch.zeros_like(flags),
        mask=flags,
        old_logprobs=made[1],
        advantages=made[2],
        reference_logprobs=made[3],
        expert_B=torch.tensor(expert).to(dtype),
        pairs_B=torch.tensor(np.sign(numbers)).to(dtype),
        top_logprobs=own + OF_TOP * made[0][..., None],
        teacher_top=teacher,
        step=int(rng.integers(1, 8)),
    )
    part = [Totals(int(f.sum()), int((f.sum(-1) > 0).sum())) for f in (flags, flags[:-1], flags[-1:])]
    totals = replace(part[0], pairs=rows // 2, rolled_out=part[1], expert=part[2])
    return Case(x, totals, mode, groups, numbers)


def _top(rng: np.random.Generator, flags: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of three of five tokens in each place, [B, R, 3]."""
    logits = torch.tensor(rng.normal(0, 2, (*flags.shape, 5)).astype(np.float32))
    return logits.double().log_softmax(-1)[..., :3].float().to(flags.dtype)


def modes_of(name: str) -> list[str]:
    """The aggregations that a loss takes."""
    own = POLICY_LOSSES[name].args.get("loss_agg_mode")
    return MODES if own is None else [mode for mode in MODES if mode in own.choices]


def with_peers(case: Case, name: str, args: dict[str, Any]) -> Case:
    """Values that sequences share."""
    x, declared = case.x, POLICY_LOSSES[name]
    reference = None if x.reference_logprobs is None else list(x.reference_logprobs.double())
    logprobs, ratios = x.logprobs.detach().double(), (x.logprobs - x.old_logprobs).detach().double()
    masks, advantages = list(x.mask > 0), list(x.advantages.double())
    batch = WholeBatch(masks, list(logprobs), list(ratios), advantages, reference, case.groups, case.numbers, x.step)
    given = {key: value for key, value in {**declared.defaults, **args}.items() if key != "loss_agg_mode"}
    if declared.keep is not None:
        x = replace(x, keep_mask=torch.stack(declared.keep(batch, **given)).to(x.mask.dtype))
    if declared.peers is not None:
        x = replace(x, peers_B=torch.tensor(declared.peers(batch, **given), dtype=x.mask.dtype))
    return replace(case, x=x)


Reference = Callable[..., float]


def slopes(reference: Callable[[Rows], float], lp: Rows) -> Rows:
    """Its derivative by differences on both sides of each number."""
    step, result = 1e-6, []
    for b, row in enumerate(lp):
        result.append([])
        for t in range(len(row)):
            moved = [[list(r) for r in lp] for _ in range(2)]
            moved[0][b][t] += step
            moved[1][b][t] -= step
            result[b].append((reference(moved[0]) - reference(moved[1])) / (2 * step))
    return result


def loss_of(name: str, case: Case, args: dict[str, Any]) -> torch.Tensor:
    return loss_and_clipped(name, case, args)[0]


def loss_and_clipped(name: str, case: Case, args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """And where the clip decided, bool [B, R], of a loss that has one."""
    defaults = {k: v for k, v in POLICY_LOSSES[name].defaults.items() if k != "loss_agg_mode"}
    share = Share(case.mode, case.totals, max_response_tokens=LIMIT)
    loss, report = POLICY_LOSSES[name](case.x.only_masked(), share, **{**defaults, **args})
    clipped = report.pop(CLIPPED, None)
    assert all(pair.shape == (2,) and pair.dtype == torch.float32 for pair in report.values())
    assert clipped is None or (clipped.shape, clipped.dtype) == (case.x.mask.shape, torch.bool)
    return loss, clipped


def gradient_of(name: str, case: Case, args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and gradient [B, R] with regard to the log-probabilities."""
    loss = loss_of(name, case, args)
    (gradient,) = torch.autograd.grad(loss, case.x.logprobs, allow_unused=True)
    return loss.detach(), torch.zeros_like(case.x.logprobs) if gradient is None else gradient
