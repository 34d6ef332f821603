"""The critic of ppo: the base model's body with one output instead of the vocabulary, trained with the policy.

Each batch: values of every action token -> advantages and returns (GAE) -> updates towards the returns, on the same
mini-batches as the policy. In the first `warmup_steps` the policy is not trained.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from trinity.config.schema.model import ModelConfig
from trinity.data.vision import image_rules
from trinity.runtime.errors import InvalidInput
from trinity.trainer.algorithms.aggregation import Report, Totals, aggregate, masked_sum
from trinity.trainer.data.batch import TrainSequence
from trinity.trainer.data.microbatch import MicroBatch
from trinity.trainer.model.attention import choose_attention
from trinity.trainer.model.fused import fuse, wants_kernels
from trinity.trainer.model.policy import TokenModel, from_pretrained, pack
from trinity.trainer.model.sequence_parallel import SequenceGroup
from trinity.trainer.model.vision import has_vision


class ValueModel(TokenModel):
    """forward returns V before each response token, from the prompt and the tokens before it. Initially V is 0."""

    def __init__(
        self, model: Any, dtype: torch.dtype, packed: bool = False, group: SequenceGroup | None = None
    ) -> None:
        super().__init__(model, packed, group)
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False, dtype=dtype)
        nn.init.zeros_(self.head.weight)

    def forward(self, micro: MicroBatch) -> torch.Tensor:
        """Values, float32 [B, R]; 0 after each response's end."""
        micro, hidden = self.hidden(micro)
        return self.gather(micro, self.head(hidden)[:, 0].float())


def load_critic(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    packed: bool = False,
    group: SequenceGroup | None = None,
    fused: bool | None = False,
    weights: bool = True,
) -> ValueModel:
    """Loads the body of the model in critic_model_path, by default model_path. Raises InvalidInput.

    weights: see load_policy.
    """
    from transformers import AutoModel

    key = "model.critic_model_path" if config.critic_model_path else "model.model_path"
    path = config.critic_model_path or config.model_path
    model = from_pretrained(AutoModel, key, path, config, dtype, weights)
    if image_rules(path, config.images) != image_rules(config.model_path, config.images):
        raise InvalidInput(key, f"{path!r} reads images otherwise than model.model_path does, or none; leave it empty")
    choose_attention(model)
    if not has_vision(model) and wants_kernels(model, fused):
        fuse(model)
    return ValueModel(model, dtype, packed and pack(model, group), group)


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    totals: Totals,
    cliprange: float,
) -> tuple[torch.Tensor, Report]:
    """Returns a micro-batch's share of the mean over action tokens of (V - return)^2 / 2, and its report. All [B, R].

    With a cliprange c above 0 the loss is the maximum of this and the same with V clipped to within c of old_values,
    the values before the batch's first update. arXiv:1707.06347, equation 9; the clip: arXiv:2005.12729, section 3.
    """
    errors = (values - returns).square()
    loss = errors
    if cliprange:
        held = old_values + (values - old_values).clamp(-cliprange, cliprange)
        loss = torch.maximum(errors, (held - returns).square())
    share = aggregate(0.5 * loss, mask, "token-mean", totals)
    report = {
        "critic/value_loss": masked_sum(0.5 * loss.detach(), mask),
        "critic/value_clipfrac": masked_sum(loss.detach() > errors.detach(), mask),
        "critic/value_mean": masked_sum(values.detach(), mask),
        "critic/return_mean": masked_sum(returns, mask),
    }
    return share, report


def in_rows(arrays: Iterable[np.ndarray | None], micro: MicroBatch) -> torch.Tensor:
    """Places an array of each sequence's response tokens in the micro-batch's [B, R]; 0 for None and padding."""
    found = np.zeros(tuple(micro.mask.shape), np.float32)
    for row, given in enumerate(arrays):
        if given is not None:
            found[row, : len(given)] = given
    return torch.from_numpy(found).to(micro.mask.device)


def explained_variance(sequences: Sequence[TrainSequence]) -> float | None:
    """Returns 1 - Var(return - V) / Var(return) over the action tokens of a batch; None if all returns are equal."""
    chosen = [s for s in sequences if s.returns is not None and s.values is not None and s.mask.any()]
    if not chosen:
        return None
    returns = np.concatenate([s.returns[s.mask] for s in chosen if s.returns is not None]).astype(np.float64)
    values = np.concatenate([s.values[s.mask] for s in chosen if s.values is not None]).astype(np.float64)
    spread = float(returns.var())
    return 1.0 - float((returns - values).var()) / spread if spread else None
