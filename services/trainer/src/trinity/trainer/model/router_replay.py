"""Replays the experts that the engine chose in the trainer's gates (R3, arXiv:2510.11370).

Rounding differs between engine and trainer. So their gates choose different experts where two are nearly equal, and
log-probabilities differ much. With replay a token goes to the recorded experts, and the trainer's own logits weigh
them: the gradient flows through these weights as it does without replay.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trinity.config.checks.router_replay import KEY, not_replayed
from trinity.config.experts import REPLAYED
from trinity.runtime.errors import InvalidInput
from trinity.trainer.data.bad_steps import Undecodable
from trinity.trainer.data.batch import TrainBatch
from trinity.trainer.data.microbatch import MicroBatch
from trinity.trainer.model.routers import gates_of
from trinity.trainer.model.vision import text_body

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_TRIAL = 8  # tokens by which a formula is compared with its gate


def _softmax(gate: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    weights = logits.softmax(-1, dtype=torch.float).gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True) if getattr(gate, "norm_topk_prob", True) else weights


def _softmax_of_chosen(_: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, chosen).softmax(-1)


def _sigmoid(gate: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    weights = logits.sigmoid().gather(1, chosen)
    if gate.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * gate.routed_scaling_factor


_FORMULAS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "softmax": _softmax, "softmax of the chosen": _softmax_of_chosen, "sigmoid": _sigmoid,
}  # fmt: skip


class RouterReplay:
    """Hooks in all gates of a transformers model. They stay idle while `routes` is None.

    `routes` int16 [tokens, layers, chosen], -1 for tokens without a record, which go where the gate chooses. It stays
    in place during the backward pass, which may compute layers again.
    """

    def __init__(self, model: Any) -> None:
        """Raises InvalidInput for a model whose gates are unknown, or weigh experts otherwise than it computes."""
        config = model.config.get_text_config()
        gates = {int(found[1]): gate for name, gate in gates_of(text_body(model)) if (found := _LAYER.search(name))}
        if not gates or config.model_type not in REPLAYED:
            raise InvalidInput(KEY, not_replayed(config.model_type))
        self._weigh = _FORMULAS[REPLAYED[config.model_type]]
        self._check(next(iter(gates.values())), config.model_type)
        self.routes: torch.Tensor | None = None
        self._sizes = config.num_hidden_layers, config.num_experts_per_tok
        self._experts = next(iter(gates.values())).weight.shape[0]
        for layer, gate in gates.items():
            gate.register_forward_hook(partial(self._replay, layer))

    @torch.no_grad()
    def _check(self, gate: Any, kind: str) -> None:
        if gate.weight.is_meta:
            return
        states = torch.randn(_TRIAL, gate.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(gate.weight)
        logits, weights, chosen = gate(states)
        if not torch.allclose(self._weigh(gate, logits, chosen).to(weights), weights, rtol=1e-2, atol=1e-4):
            problem = f"is true, and this transformers weighs the experts of {kind} otherwise than Trinity replays them"
            raise InvalidInput(KEY, f"{problem}; set it to false")

    def _replay(self, layer: int, gate: Any, _inputs: Any, outputs: Any) -> Any:
        if self.routes is None:
            return None
        logits, weights, chosen = outputs
        recorded = self.routes[:, layer].long()
        chosen = torch.where(recorded >= 0, recorded, chosen)
        return logits, self._weigh(gate, logits, chosen).to(weights.dtype), chosen

    def check(self, batch: TrainBatch) -> None:
        """Raises Undecodable naming groups with routes that this model does not have."""
        wrong = []
        for sequence in batch.sequences:
            routes = sequence.routes
            if routes is None:
                continue
            fits = (routes.layers, routes.chosen) == self._sizes
            if not fits or int(routes.ids(sequence.length).max(initial=0)) >= self._experts:
                wrong.append(sequence.group)
        if wrong:
            layers, chosen = self._sizes
            model = f"{layers} layers, {chosen} of {self._experts} experts"
            raise Undecodable(f"the recorded routes are not of this model ({model})", batch.step, wrong)


def replayed_share(micro: MicroBatch) -> torch.Tensor:
    """Returns [predicted tokens whose experts are replayed, predicted tokens]."""
    count = len(micro.predicting)
    known = 0 if micro.routes is None else int((micro.routes[micro.predicting, 0, 0] >= 0).sum())
    return torch.tensor([known, count], dtype=torch.float32, device=micro.mask.device)
