"""One base model with the adapters of several tenants. A tenant's gradient and optimizer state are its own."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from trinity.config.schema.model import ModelConfig
from trinity.data.tenants.wire import Datum, Forward
from trinity.runtime.errors import InvalidInput
from trinity.trainer.data.microbatch import MicroBatch
from trinity.trainer.model.lora import adapter_weights, inject, linear_shapes, remove_adapter, use_adapter
from trinity.trainer.model.policy import disable_dropout, load_policy
from trinity.trainer.tenants.losses import token_loss
from trinity.weights import Lora, LoraTarget

ALPHA = 32.0  # of every rank, as in "LoRA Without Regret" (Thinking Machines, 2025)
_CHUNK = 1024  # tokens whose logits exist at a time
_GROUP = ("exp_avg", "exp_avg_sq")

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class AdapterShape:
    """Rank and layers of a tenant's adapters. `seed` chooses their initial values."""

    rank: int
    seed: int = 0
    attention: bool = True
    mlp: bool = True


@dataclass
class Tenant:
    """The adapters of one model. `name`: of the adapters in peft, a token. `steps`: optimizer steps so far."""

    name: str
    shape: AdapterShape
    lora: Lora
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.AdamW
    steps: int = field(default=0)

    def state(self, *, gradients: bool) -> Tensors:
        """Copies the adapters, the optimizer's moments, and the accumulated gradient, to host memory."""
        found: Tensors = {}
        for name, parameter in self.parameters.items():
            found[f"weights.{name}"] = parameter.detach()
            if gradients and parameter.grad is not None:
                found[f"gradient.{name}"] = parameter.grad
            for part in _GROUP if self.optimizer.state.get(parameter) else ():
                found[f"{part}.{name}"] = self.optimizer.state[parameter][part]
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in found.items()}

    def restore(self, state: Tensors, steps: int, *, optimizer: bool = True) -> None:
        """Takes over a state of the same shape; without `optimizer` the moments begin anew."""
        self.optimizer.state.clear()
        self.steps = steps if optimizer else 0
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state[f"weights.{name}"])
                gradient = state.get(f"gradient.{name}")
                parameter.grad = None if gradient is None else gradient.to(parameter)
                if optimizer and f"exp_avg.{name}" in state:
                    moments = {part: state[f"{part}.{name}"].to(parameter) for part in _GROUP}
                    self.optimizer.state[parameter] = {"step": torch.tensor(float(steps)), **moments}

    def step(self, rate: float, betas: tuple[float, float], eps: float, decay: float, clip: float) -> float:
        """Makes one AdamW step of the accumulated gradient, and forgets it. Returns the gradient's norm.

        clip: largest norm; 0: none. Without a gradient nothing changes.
        """
        parameters = [parameter for parameter in self.parameters.values() if parameter.grad is not None]
        if not parameters:
            return 0.0
        norm = float(nn.utils.clip_grad_norm_(parameters, clip or math.inf, foreach=False))
        if not math.isfinite(norm):
            self.forget_gradient()
            raise InvalidInput("gradient", f"has the norm {norm}; it was dropped, and the weights are unchanged")
        for group in self.optimizer.param_groups:
            group.update(lr=rate, betas=betas, eps=eps, weight_decay=decay)
        self.optimizer.step()
        self.forget_gradient()
        self.steps += 1
        return norm

    def forget_gradient(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


class SharedModel:
    """The base model, frozen, and its tenants."""

    def __init__(self, model_path: str, dtype: torch.dtype, device: torch.device, micro_tokens: int) -> None:
        """micro_tokens: tokens of a forward pass with padding; a longer sequence is one pass. Raises InvalidInput."""
        config = ModelConfig(model_path=model_path)
        self._policy = load_policy(config, dtype, _CHUNK)
        disable_dropout(self._policy, model_path)
        self._policy.requires_grad_(False).to(device)
        self._linear = linear_shapes(self._policy.model)
        self._device, self._dtype, self._micro_tokens = device, dtype, micro_tokens

    def add(self, name: str, shape: AdapterShape) -> Tenant:
        """Makes new adapters. Raises InvalidInput if the model has no layer of the chosen kinds."""
        chosen = [
            one for one in self._linear if (shape.attention if "attn" in one or "attention" in one else shape.mlp)
        ]
        if not chosen:
            raise InvalidInput("lora_config", "chooses no layer of the model; set train_attn or train_mlp")
        targets = tuple(LoraTarget(f"{one}.weight", self._linear[one]) for one in chosen)
        lora = Lora(shape.rank, ALPHA, targets)
        inject(self._policy.model, lora, name, shape.seed)
        parameters = dict(adapter_weights(self._policy.model, name))
        for parameter in parameters.values():
            parameter.data = parameter.data.to(self._device, self._dtype)
        optimizer = torch.optim.AdamW(list(parameters.values()), foreach=False)
        return Tenant(name, shape, lora, parameters, optimizer)

    def remove(self, tenant: Tenant) -> None:
        remove_adapter(self._policy.model, tenant.name)

    def run(self, tenant: Tenant, forward: Forward) -> tuple[list[np.ndarray], float]:
        """Returns the log-probabilities of the targets of each sequence, float32, and the loss.

        With forward.backward the gradient is added to the tenant's once all of it is computed, so that a pass that
        fails leaves it unchanged.
        """
        use_adapter(self._policy.model, tenant.name)
        parameters = list(tenant.parameters.values())
        total: list[torch.Tensor] = []
        loss_sum, found = 0.0, list[np.ndarray]()
        for data in self._parts(forward.data):
            with torch.set_grad_enabled(forward.backward):
                logprobs = self._logprobs(data)
                inputs = {name: self._aligned(data, name) for name in data[0].inputs if name != "target_tokens"}
                loss = token_loss(forward.loss, forward.config, logprobs, inputs)
            if forward.backward:
                gradients = torch.autograd.grad(loss, parameters)
                total = [a + b for a, b in zip(total, gradients, strict=True)] if total else list(gradients)
            loss_sum += float(loss.detach())
            rows = logprobs.detach().float().cpu().numpy()
            found += [row[: len(datum.tokens)] for row, datum in zip(rows, data, strict=True)]
        for parameter, gradient in zip(parameters, total, strict=False):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return found, loss_sum

    def _parts(self, data: Sequence[Datum]) -> Iterator[list[Datum]]:
        """Yields the sequences in order, as many at a time as fit."""
        part: list[Datum] = []
        for datum in data:
            width = max(len(one.tokens) for one in [*part, datum])
            if part and width * (len(part) + 1) > self._micro_tokens:
                yield part
                part = []
            part.append(datum)
        if part:
            yield part

    def _logprobs(self, data: list[Datum]) -> torch.Tensor:
        """Returns the log-probability of each target, float32 [B, N]; 0 after each sequence's end."""
        micro = _micro_batch(data).to(self._device)
        logprobs, _ = self._policy(micro)
        result: torch.Tensor = logprobs
        return result

    def _aligned(self, data: list[Datum], name: str) -> torch.Tensor:
        values = np.zeros((len(data), max(len(datum.tokens) for datum in data)), np.float32)
        for row, datum in enumerate(data):
            values[row, : len(datum.tokens)] = datum.inputs[name]
        return torch.from_numpy(values).to(self._device)


def _micro_batch(data: list[Datum]) -> MicroBatch:
    """Makes the tensors of sequences whose every token predicts its target. The loss reads no other field."""
    lengths = [len(datum.tokens) for datum in data]
    rows, width = len(data), max(lengths)
    ids, attention = np.zeros((rows, width), np.int64), np.zeros((rows, width), np.int64)
    for row, datum in enumerate(data):
        ids[row, : lengths[row]], attention[row, : lengths[row]] = datum.tokens, 1
    places = torch.from_numpy(np.flatnonzero(attention))
    zeros, nothing = torch.zeros(rows, width), torch.zeros(rows)
    others: dict[str, Any] = dict.fromkeys(
        ("mask", "old_logprobs", "advantages", "on_policy_mask", "keep_mask", "reference_logprobs"), zeros
    )
    return MicroBatch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.arange(width).expand(rows, width),
        attention_mask=torch.from_numpy(attention),
        boundaries=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        lengths=tuple(lengths),
        predicting=places,
        targets=torch.from_numpy(np.concatenate([datum.inputs["target_tokens"] for datum in data])),
        token_temperatures=torch.ones(len(places)),
        flat_indices=places,
        proximal_logprobs=None,
        expert=nothing,
        pairs=nothing,
        peers=nothing,
        **others,
    )
