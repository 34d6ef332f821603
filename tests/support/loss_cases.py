"""Random batches for policy losses, and how a loss and the loop in plain floats that it is held against are evaluated.

A loop gets `lp`, the log-probabilities that are differentiated, and `sg`, the same numbers behind a stop-gradient; its
gradient is taken by differences.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trinity.config.algorithm_parts import POLICY_LOSSES as NAMES
from trinity.trainer.algorithms.aggregation import Share, Totals
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.policy_losses import POLICY_LOSSES, covariance, dpo, m2po, opmd

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LIMIT = 8  # max_response_tokens of the run
Rows = list[list[float]]


@dataclass(frozen=True)
class Case:
    """A batch, as tensors and, of the trained tokens alone, as lists."""

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
    x = LossInputs(
        logprobs=made[0].requires_grad_(),
        entropy=torch.zeros_like(flags),
        mask=flags,
        old_logprobs=made[1],
        advantages=made[2],
        reference_logprobs=made[3],
        expert_B=torch.tensor(expert).to(dtype),
        pairs_B=torch.tensor(np.sign(numbers)).to(dtype),
        step=int(rng.integers(1, 8)),
    )
    part = [Totals(int(f.sum()), int((f.sum(-1) > 0).sum())) for f in (flags, flags[:-1], flags[-1:])]
    totals = replace(part[0], pairs=rows // 2, rolled_out=part[1], expert=part[2])
    return Case(x, totals, mode, groups, numbers)


def with_peers(case: Case, name: str, args: dict[str, Any]) -> Case:
    """What the sequences have to know of each other."""
    x, mask = case.x, case.x.mask > 0
    if name == "m2po":
        ratios = list((x.logprobs - x.old_logprobs).detach().double())
        kept = m2po.keep(ratios, list(x.advantages.double()), list(mask), args.get("m2_threshold", 0.04))
        return replace(case, x=replace(x, keep_mask=torch.stack(kept).to(x.mask.dtype)))
    if name in ("clip_cov", "kl_cov"):
        logprobs, ratios = list(x.logprobs.detach().double()), list((x.logprobs - x.old_logprobs).detach().double())
        numbers, given = list(x.advantages.double()), {**NAMES[name], **args}
        if name == "clip_cov":
            kept = covariance.chosen_to_clip(logprobs, ratios, numbers, list(mask), given, x.step)
        else:
            kept = covariance.chosen_to_hold(logprobs, numbers, list(mask), given["kl_cov_ratio"])
        return replace(case, x=replace(x, keep_mask=torch.stack(kept).to(x.mask.dtype)))
    if name == "dpo":
        assert x.reference_logprobs is not None
        distances = ((x.logprobs - x.reference_logprobs).detach() * x.mask).sum(-1).tolist()
        peers = dpo.partners(distances, case.numbers)
    else:
        ratios = list((x.logprobs - x.old_logprobs).detach())
        peers = opmd.group_means(list(x.advantages), ratios, list(mask), case.groups, args.get("tau", 1.0))
    return replace(case, x=replace(x, peers_B=torch.tensor(peers, dtype=x.mask.dtype)))


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
    defaults = {k: v for k, v in NAMES[name].items() if k != "loss_agg_mode"}
    share = Share(case.mode, case.totals, max_response_tokens=LIMIT)
    loss, report = POLICY_LOSSES[name](case.x.only_masked(), share, **{**defaults, **args})
    assert all(pair.shape == (2,) and pair.dtype == torch.float32 for pair in report.values())
    return loss


def gradient_of(name: str, case: Case, args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and gradient [B, R] with regard to the log-probabilities."""
    loss = loss_of(name, case, args)
    (gradient,) = torch.autograd.grad(loss, case.x.logprobs, allow_unused=True)
    return loss.detach(), torch.zeros_like(case.x.logprobs) if gradient is None else gradient
