"""One base model with the adapters of several tenants. A tenant's gradient and optimizer state are its own."""

import hashlib
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from trinity.config.schema.model import ModelConfig
from trinity.runtime.errors import InvalidInput
from trinity.tinker.commands.wire import Datum, Forward
from trinity.tinker.executor.adapters import remove_adapter, several_adapters
from trinity.tinker.executor.losses import token_loss
from trinity.trainer.data.microbatch import MicroBatch
from trinity.trainer.model.lora import adapter_weights, inject, linear_shapes, write_adapters
from trinity.trainer.model.policy import disable_dropout, load_policy
from trinity.trainer.weights.canary import pseudo_random_probe
from trinity.weights.lora import Lora, LoraTarget
from trinity.weights.manifest import Canary, Probe

ALPHA = 32.0  # of every rank, as in "LoRA Without Regret" (Thinking Machines, 2025)
_CHUNK = 1024  # tokens whose logits exist at a time
_COPIED = 2**26  # values that a copy to the host joins at least, 256 MiB; a state may have gigabytes
_GROUP = ("exp_avg", "exp_avg_sq")
_PROBES, _PROBE_TOKENS = 2, 16
_DIGESTED = 64  # values of each layer
# Mean and largest difference between trainer and engine, in nats, as for the versions of a run. In half precision both
# round large logits of pseudo-random tokens to 1/8.
_ALLOWED = {torch.float32: (1e-3, 1e-2), torch.bfloat16: (0.25, 2.5)}

Tensors = dict[str, torch.Tensor]
Output = tuple[list[np.ndarray], float]  # log-probabilities of each sequence, and the loss
Value = TypeVar("Value")
Parts = Generator[None, None, Value]


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
        return _on_host(found, torch.float32)

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
                    at = torch.tensor(float(steps), device=parameter.device)
                    self.optimizer.state[parameter] = {"step": at, **moments}

    def add_gradient(self, gradient: Sequence[torch.Tensor]) -> None:
        for parameter, more in zip(self.parameters.values(), gradient, strict=True):
            parameter.grad = more if parameter.grad is None else parameter.grad + more

    def step(self, rate: float, betas: tuple[float, float], eps: float, decay: float, clip: float) -> float:
        """Makes one AdamW step of the accumulated gradient, and forgets it. Returns the gradient's norm.

        clip: largest norm; 0: none. Without a gradient nothing changes.
        """
        parameters = [parameter for parameter in self.parameters.values() if parameter.grad is not None]
        if not parameters:
            return 0.0
        norm = float(nn.utils.clip_grad_norm_(parameters, clip or math.inf, foreach=parameters[0].is_cuda))
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
        self._path, self._dtype, self._allowed = model_path, dtype, _ALLOWED[dtype]
        self._policy = load_policy(config, dtype, _CHUNK)
        disable_dropout(self._policy, model_path)
        self._policy.requires_grad_(False).to(device)
        self._linear = linear_shapes(self._policy.model)
        self._device, self._micro_tokens = device, micro_tokens

    def digest(self) -> str:
        """Returns a digest of the first values of each linear layer, in bfloat16: equal in every dtype."""
        found = hashlib.sha256()
        for name in sorted(self._linear):
            values = self._policy.model.get_parameter(f"{name}.weight").detach().flatten()[:_DIGESTED]
            found.update(name.encode() + values.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
        return found.hexdigest()

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
            parameter.data = parameter.data.to(self._device, torch.float32)  # bfloat16 would lose small updates
        optimizer = torch.optim.AdamW(list(parameters.values()), foreach=False, fused=self._device.type == "cuda")
        return Tenant(name, shape, lora, parameters, optimizer)

    def remove(self, tenant: Tenant) -> None:
        remove_adapter(self._policy.model, tenant.name)

    def run(self, tenant: Tenant, forward: Forward) -> Parts[Output]:
        """Returns the log-probabilities of the targets of each sequence, float32, and the loss.

        Yields after each part of the sequences; passes of other tenants may run then. With forward.backward the
        gradient is added to the tenant's once all of it is computed, so that a pass that fails leaves it unchanged.
        """
        found, gradients = yield from self._together([(tenant, forward)])
        if gradients:
            tenant.add_gradient(gradients[0])
        return found[0]

    def run_together(self, passes: Sequence[tuple[Tenant, Forward]]) -> Parts[list[Output] | None]:
        """Computes passes of different tenants as one: the sequences of all are rows of the same batches.

        All are with gradients, or all without. Yields and returns what `run` would for each, but for rounding. Returns
        None, and changes nothing, if it fails or if a value is not finite: such a row can spoil those of other tenants.
        """
        try:
            found, gradients = yield from self._together(passes)
        except (RuntimeError, ValueError):
            return None
        sums = [loss for _, loss in found] + [float(norm) for norm in _norms(gradients)]
        if not all(map(math.isfinite, sums)):
            return None
        for (tenant, _), gradient in zip(passes, gradients, strict=False):
            tenant.add_gradient(gradient)
        return found

    def _together(
        self, passes: Sequence[tuple[Tenant, Forward]]
    ) -> Parts[tuple[list[Output], list[list[torch.Tensor]]]]:
        """The results of passes of different tenants; and the gradient of each, if they are with gradients."""
        found: list[Output] = [([], 0.0) for _ in passes]
        backward = passes[0][1].backward
        total: dict[int, list[torch.Tensor]] = {}
        owners = [index for index, (_, forward) in enumerate(passes) for _ in forward.data]
        at = 0
        for data in self._parts([datum for _, forward in passes for datum in forward.data]):
            if at:
                yield
            owned, at = owners[at : at + len(data)], at + len(data)
            rows = [passes[index][0].name for index in owned]
            parameters = {index: list(passes[index][0].parameters.values()) for index in dict.fromkeys(owned)}
            together = list(chain.from_iterable(parameters.values()))
            for parameter in together:  # peft switches off the adapters that it does not use
                parameter.requires_grad_(True)
            with several_adapters(self._policy.model, rows), torch.set_grad_enabled(backward):
                logprobs = self._logprobs(data)
                losses: list[torch.Tensor] = []
                for index in parameters:
                    own = [row for row, owner in enumerate(owned) if owner == index]
                    of_tenant, its_logprobs = [data[row] for row in own], logprobs[own[0] : own[-1] + 1]
                    losses.append(self._loss(passes[index][1], of_tenant, its_logprobs))
                    found[index] = [*found[index][0], *_rows(of_tenant, its_logprobs)], found[index][1]
                summed = torch.stack(losses)
                gradients = iter(torch.autograd.grad(summed.sum(), together) if backward else ())
            for index, loss in zip(parameters, summed.detach().tolist(), strict=True):
                found[index] = found[index][0], found[index][1] + loss
                more = [next(gradients) for _ in parameters[index]] if backward else []
                before = total.get(index)
                total[index] = [a + b for a, b in zip(before, more, strict=True)] if before else more
        # A part of B's joined gradient has other strides than its parameter, which a fused optimizer refuses.
        return found, [[one.contiguous() for one in total[index]] for index in range(len(passes))] if backward else []

    def _loss(self, forward: Forward, data: list[Datum], logprobs: torch.Tensor) -> torch.Tensor:
        """logprobs: float32 [B, N], of which the sequences may be shorter."""
        width = logprobs.shape[1]
        inputs = {name: self._aligned(data, name, width) for name in data[0].inputs if name != "target_tokens"}
        return token_loss(forward.loss, forward.config, logprobs, inputs)

    def copy(self, tenant: Tenant) -> Callable[[Path], None]:
        """Copies the adapters, in the dtype of the base. The function that is returned writes them to a folder in
        peft's format."""
        weights = _on_host({name: one.detach() for name, one in tenant.parameters.items()}, self._dtype)
        return lambda folder: write_adapters(folder, tenant.lora, self._path, list(weights.items()))

    def canary(self, tenant: Tenant) -> Canary:
        """Returns log-probabilities that an engine with these adapters must compute. Raises InvalidInput if they are
        not finite."""
        tokens = pseudo_random_probe(self._policy.model.config.get_text_config().vocab_size)[:_PROBES]
        probes = [np.array(row[:_PROBE_TOKENS]) for row in tokens]
        ones = np.ones(_PROBE_TOKENS - 1, np.float32)
        data = tuple(Datum(row[:-1], {"target_tokens": row[1:], "weights": ones}) for row in probes)
        found, _ = finished(self.run(tenant, Forward("", 0, data, "cross_entropy", {}, backward=False)))
        if not all(np.isfinite(row).all() for row in found):
            raise InvalidInput("weights", "give log-probabilities that are not finite; load a state from before")
        pairs = zip(probes, found, strict=True)
        made = tuple(Probe(tuple(row.tolist()), tuple(logprobs.tolist())) for row, logprobs in pairs)
        return Canary(made, *self._allowed)

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

    def _aligned(self, data: list[Datum], name: str, width: int) -> torch.Tensor:
        values = np.zeros((len(data), width), np.float32)
        for row, datum in enumerate(data):
            values[row, : len(datum.tokens)] = datum.inputs[name]
        return torch.from_numpy(values).to(self._device)


def finished(parts: Parts[Value]) -> Value:
    """Runs all parts of a pass without a pause."""
    try:
        while True:
            next(parts)
    except StopIteration as ended:
        value: Value = ended.value
        return value


def _on_host(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Copies tensors to host memory, many at once: several hundred small copies cost a GPU a tenth of a second."""
    found: Tensors = {}
    joined: Tensors = {}
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        joined[name] = tensor
        if number < len(tensors) and sum(one.numel() for one in joined.values()) < _COPIED:
            continue
        flat = torch.cat([one.flatten() for one in joined.values()]).to(dtype).cpu()
        parts = flat.split([one.numel() for one in joined.values()])
        found |= {key: part.view(one.shape) for (key, one), part in zip(joined.items(), parts, strict=True)}
        joined = {}
    return found


def _rows(data: list[Datum], logprobs: torch.Tensor) -> list[np.ndarray]:
    """Returns the values of each sequence, without those behind its end."""
    rows = logprobs.detach().float().cpu().numpy()
    return [row[: len(datum.tokens)] for row, datum in zip(rows, data, strict=True)]


def _norms(gradients: list[list[torch.Tensor]]) -> list[float]:
    """Returns the norm of each tenant's gradient."""
    return torch.stack([nn.utils.get_total_norm(gradient) for gradient in gradients]).tolist() if gradients else []


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
