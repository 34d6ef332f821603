"""The loss that balances a mixture's experts (Switch Transformer, arXiv:2101.03961, equations 4 to 6).

E * sum over experts of (their tokens / tokens) * (mean of their probabilities), averaged over the layers; a token
counts for each of its experts. It is least if all experts get equally many tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trinity.runtime.errors import InvalidInput
from trinity.trainer.data.microbatch import MicroBatch
from trinity.trainer.model import sequence_parallel
from trinity.trainer.model.vision import text_body

KEY = "algorithm.router_aux_loss_coef"


class Routers:
    """Records the logits of a transformers model's routers. Raises InvalidInput for a model without routers."""

    def __init__(self, model: Any) -> None:
        body = text_body(model)
        found, place = [gate for _, gate in gates_of(body)], getattr(_recorder(body), "index", 0)
        if not found:
            raise InvalidInput(KEY, f"is above 0, and {type(model).__name__} has no routers of experts; set it to 0")
        self._top_k = int(getattr(model.config.get_text_config(), "num_experts_per_tok", 1))
        self._logits: list[torch.Tensor] | None = None
        for module in found:
            module.register_forward_hook(lambda _module, _inputs, outputs: self._record(outputs[place]))

    def _record(self, logits: torch.Tensor) -> None:
        if self._logits is not None:  # None also while the backward pass computes layers again
            self._logits.append(logits)

    @contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """Yields a list that gets the logits [tokens, experts] of each layer that runs in the block."""
        logits: list[torch.Tensor] = []
        self._logits = logits
        try:
            yield logits
        finally:
            self._logits = None

    def balance_loss(self, logits: list[torch.Tensor], micro: MicroBatch) -> torch.Tensor:
        """Returns the loss of the micro-batch's tokens, prompts included and padding not."""
        losses = []
        for one in logits:
            one = one.reshape(-1, one.shape[-1]).float()
            if micro.attention_mask is not None:
                one = one[micro.attention_mask.reshape(-1) > 0]
            chosen = torch.zeros_like(one).scatter_(1, one.topk(self._top_k, dim=1).indices, 1.0)
            losses.append(one.shape[1] * (chosen.mean(0) * one.softmax(1).mean(0)).sum())
        return torch.stack(losses).mean()


def gates_of(body: Any) -> list[tuple[str, Any]]:
    """Returns the gates of a transformers language model by name."""
    kind = getattr(_recorder(body), "target_class", None)
    return [] if kind is None else [(name, module) for name, module in body.named_modules() if isinstance(module, kind)]


def _recorder(body: Any) -> Any:
    return (getattr(body, "_can_record_outputs", None) or {}).get("router_logits")


def routers_of(model: Any, coefficient: float, shared: bool) -> Routers | None:
    """Returns the routers whose balance is a term of the loss; None if it is not. shared: ranks share sequences.

    Raises InvalidInput for a model without routers, and for ranks that share sequences.
    """
    if not coefficient:
        return None
    if shared:
        raise InvalidInput(KEY, f"is above 0, and {sequence_parallel.KEY} is above 1; set one of them back")
    return Routers(model)
