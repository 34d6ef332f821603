"""Chooses micro-batch size and activation checkpointing where the YAML leaves them open.

Python and DeepSpeed take a constant time for a micro-batch of any size: 0.3 s for 24 layers, in which an H200 trains
30,000 tokens of a 0.5 B model. So micro-batches are as large as memory allows, up to the size at which this time no
longer matters. Activations that fit need no recompute, which took a fifth of a step.
"""

from dataclasses import asdict, dataclass

import structlog
import torch

from trinity.config import Plan
from trinity.config.memory import TRAINER_BESIDE_GIB, Sharding, activation_bytes, training_gib
from trinity.trainer.model.checkpointing import Checkpointing
from trinity.trainer.model.four_bit import elements_in_four_bits
from trinity.trainer.model.policy import TokenModel
from trinity.trainer.process.ranks import Ranks

log = structlog.get_logger(__name__)

_GIB = 2**30
# Parameters x tokens that keep a large GPU busy while the host launches the next micro-batch.
_BUSY, _LEAST, _MOST = 2.5e13, 16_384, 65_536
_KINDS: tuple[Checkpointing, ...] = (False, "mlp", True)  # the fastest first
# Shares of the remaining memory that estimated activations may take; the estimate knows only the usual layers. For
# lean layers without recompute it is at least 1.2 times the measured memory.
_SHARE, _SHARE_OF_LEAN = 0.5, 0.9


@dataclass(frozen=True)
class Activations:
    """tokens: limit of a micro-batch. recompute: kind of activations that the backward pass recomputes. layers: number
    of layers, from the first, that recompute them; None: all."""

    tokens: int
    recompute: Checkpointing
    layers: int | None = None


def choose(plan: Plan, model: TokenModel, ranks: Ranks, device: torch.device, memory: int | None) -> Activations:
    """Takes the YAML's choice, or else the largest micro-batch and the fastest recompute that fit. A collective.

    memory: bytes that this rank may take of its GPU; None: no GPU. Without a GPU, or for a model that is not packed or
    whose layers the estimate does not know, the limit is twice the model's length, and all layers recompute. Models
    that are not lean also recompute all layers unless the YAML says otherwise.
    """
    trainer, least = plan.config.trainer, plan.micro_batch_tokens
    kinds = _KINDS if model.lean else (True,)
    if trainer.gradient_checkpointing is not None:
        kinds = (trainer.gradient_checkpointing,)
    configured = trainer.gradient_checkpointing_layers
    shape = model.model.config.get_text_config()
    if memory is None or not model.packed or not activation_bytes(shape, kinds[-1]):
        return Activations(least, kinds[-1], configured)
    # ds_numel is the whole size; under ZeRO 3 the parameter is a shard.
    count = sum(int(getattr(p, "ds_numel", None) or p.numel()) for p in model.parameters())
    count += elements_in_four_bits(model)
    worth = least
    if not trainer.use_dynamic_bsz:
        readers = 1 if model.group is None else model.group.size
        worth = trainer.micro_batch_size_per_gpu * plan.lengths.model // readers
    elif trainer.max_token_len_per_gpu is None:
        worth = max(least, _LEAST, min(_MOST, int(_BUSY / count)))
    room = memory - (training_gib(plan, count, Sharding.of(plan, ranks.world_size)) + TRAINER_BESIDE_GIB) * _GIB
    width = 2 if trainer.deepspeed.dtype == "float32" else 1
    shares = [_SHARE_OF_LEAN if model.lean and kind is not True else _SHARE for kind in kinds]
    each = [width * activation_bytes(shape, kind, model.lean) for kind in kinds]
    fits = [int(share * room / size) for share, size in zip(shares, each, strict=True)]
    place = next((index for index, tokens in enumerate(fits) if worth <= tokens), len(kinds) - 1)
    tokens = max(least, min(worth, fits[place]))
    kept = 0
    if kinds[place] is False:
        kept = shape.num_hidden_layers
    elif kinds[place] == "mlp" and len(kinds) > 1:
        spare = shares[place] * room - tokens * each[place]
        kept = max(0, int(shape.num_hidden_layers * spare / (tokens * (each[0] - each[place]))))
    tokens, left, kept = _least_of_all([tokens, len(kinds) - place, kept], ranks, device)
    recompute = kinds[len(kinds) - left]
    layers = shape.num_hidden_layers - kept if recompute == "mlp" and kept else None
    chosen = Activations(tokens, recompute, configured or layers)
    log.info("trainer.activations.chosen", **asdict(chosen), fits=fits, worth=worth)
    return chosen


def _least_of_all(numbers: list[int], ranks: Ranks, device: torch.device) -> list[int]:
    """Takes the minimum over ranks: GPUs may differ, but every rank needs the same number of micro-batches."""
    if ranks.world_size == 1:
        return numbers
    found = torch.tensor(numbers, device=device)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN)
    return [int(number) for number in found]
