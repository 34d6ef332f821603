"""DPO, on pairs of sequences that may be in different micro-batches."""

from typing import Annotated, Any

import torch
from pydantic import Field
from torch.nn.functional import logsigmoid

from trinity.plugins import Positive, algorithm, policy_loss
from trinity.trainer.algorithms.aggregation import Report, Share, masked_sum
from trinity.trainer.algorithms.inputs import LossInputs, WholeBatch, sequence_sum


def partners(batch: WholeBatch, **_: Any) -> list[float]:
    """D of the other sequence of each sequence's pair; 0 without a pair."""
    assert batch.reference is not None
    parts = zip(batch.logprobs, batch.reference, batch.masks, strict=True)
    distances = [float((lp - reference)[mask].sum()) for lp, reference, mask in parts]
    of_number = dict(zip(batch.pairs, distances, strict=True))
    return [of_number[-number] if number else 0.0 for number in batch.pairs]


@policy_loss("dpo", source="arXiv:2305.18290, eq. 7", traits=["sequences", "pairs", "reference"], peers=partners)
def dpo(
    x: LossInputs, share: Share, *, beta: Positive = 0.1, label_smoothing: Annotated[float, Field(ge=0, le=0.5)] = 0.0
) -> tuple[torch.Tensor, Report]:
    """-(1 - ls) log sigmoid(z) - ls log sigmoid(-z), z = beta (D of the chosen - D of the rejected), D the sum of
    lp - ref over a response; the mean over pairs.

    ls: label_smoothing (conservative DPO). D of the other sequence is x.peers_B. Each sequence adds half of the
    pair's value, and the whole gradient of its D. So the pair's value and gradient do not depend on the micro-batches.
    """
    assert x.peers_B is not None
    assert x.pairs_B is not None
    assert x.reference_logprobs is not None
    distance = sequence_sum(x.logprobs - x.reference_logprobs, x.mask)
    z = beta * x.pairs_B * (distance - x.peers_B)
    loss = -(1 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z)
    paired = x.pairs_B != 0
    halved = (loss - 0.5 * loss.detach()) * paired
    report = {
        "dpo_loss": masked_sum(loss.detach(), paired),
        "dpo_accuracy": masked_sum(z.detach() > 0, paired),
        "dpo_margin": masked_sum(z.detach(), paired),
        "chosen_reward": masked_sum(beta * distance.detach(), x.pairs_B > 0),
        "rejected_reward": masked_sum(beta * distance.detach(), x.pairs_B < 0),
    }
    return halved.sum() / max(share.totals.pairs, 1), report


algorithm(
    "dpo",
    policy_loss="dpo",
    kl_loss="k2",
    entropy_loss="default",
    note="Learns from preference pairs of a dataset (mode train), or of each group: best with worst, next with next.",
)
