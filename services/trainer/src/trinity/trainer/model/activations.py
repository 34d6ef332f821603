"""How many activations a GPU holds, where the YAML does not say: of how many tokens, and which are made anew.

A micro-batch takes Python and DeepSpeed as long whatever is in it: 0.3 s were seen for 24 layers, in which an H200
learns from 30,000 tokens of a 0.5 B model. So micro-batches are as large as is worth it, if activations have room; and
what has room need not be computed twice, which took a fifth of a step.
"""

from dataclasses import dataclass
from typing import Any

import structlog
import torch

from trinity.config import Plan
from trinity.config.memory import Sharding, training_gib
from trinity.trainer.model.checkpointing import Checkpointing
from trinity.trainer.model.policy import TokenModel
from trinity.trainer.ranks import Ranks

log = structlog.get_logger(__name__)

_GIB = 2**30
# Parameters x tokens that keep a large GPU busy while the next micro-batch is put to it.
_WORTH, _LEAST, _MOST = 2.5e13, 16_384, 65_536
_RESERVE_GIB = 4.0  # CUDA, NCCL, gradients that are exchanged, logits of a chunk
_KINDS: tuple[Checkpointing, ...] = (False, "mlp", True)  # the fastest first
# Of the memory left, by the estimate, which knows only the usual layers. Of lean ones that are kept it says at least
# half as much again as was seen.
_SHARE, _SHARE_OF_LEAN = 0.5, 0.9


@dataclass(frozen=True)
class Activations:
    """tokens: of a micro-batch, at most. anew: what of its activations is made anew in the backward pass."""

    tokens: int
    anew: Checkpointing


def choose(plan: Plan, model: TokenModel, ranks: Ranks, device: torch.device, memory: int | None) -> Activations:
    """As the YAML says, or the largest and fastest that fit. A collective. `memory`: of this rank's GPU; None: none.

    Without a GPU, or where the model is not packed or not known, twice the model's length and all layers made anew. Of
    others than lean models, too, all is made anew where the YAML does not say.
    """
    trainer, least = plan.config.trainer, plan.micro_batch_tokens
    kinds = _KINDS if model.lean else (True,)
    if trainer.gradient_checkpointing is not None:
        kinds = (trainer.gradient_checkpointing,)
    shape = model.model.config.get_text_config()
    if memory is None or not model.packed or not activation_bytes(shape, kinds[-1]):
        return Activations(least, kinds[-1])
    count = sum(_whole_size(parameter) for parameter in model.parameters())
    worth = least
    if not trainer.use_dynamic_bsz:
        readers = 1 if model.group is None else model.group.size
        worth = trainer.micro_batch_size_per_gpu * plan.lengths.model // readers
    elif trainer.max_token_len_per_gpu is None:
        worth = max(least, _LEAST, min(_MOST, int(_WORTH / count)))
    room = memory - (training_gib(plan, count, Sharding.of(plan, ranks.world_size)) + _RESERVE_GIB) * _GIB
    width = 2 if trainer.deepspeed.dtype == "float32" else 1
    shares = [_SHARE_OF_LEAN if model.lean and kind is not True else _SHARE for kind in kinds]
    each = [width * activation_bytes(shape, kind) for kind in kinds]
    fits = [int(share * room / size) for share, size in zip(shares, each, strict=True)]
    place = next((index for index, tokens in enumerate(fits) if worth <= tokens), len(kinds) - 1)
    tokens = max(least, min(worth, fits[place]))
    tokens, left = _least_of_all([tokens, len(kinds) - place], ranks, device)
    chosen = Activations(tokens, kinds[len(kinds) - left])
    log.info("trainer.activations.chosen", tokens=tokens, made_anew=chosen.anew, fits=fits, worth=worth)
    return chosen


def activation_bytes(shape: Any, checkpointing: Checkpointing) -> float:
    """Of a token in bfloat16, kept until the backward pass; 0 where the model's shape is not known.

    A layer keeps 12 hidden and 2 intermediate states. Made anew as a whole it keeps the hidden state it began with, and
    one layer at a time has all; of MLPs the intermediate ones are made anew.
    """
    hidden, layers = getattr(shape, "hidden_size", None), getattr(shape, "num_hidden_layers", None)
    if not hidden or not layers:
        return 0.0
    inner = _largest(getattr(shape, "intermediate_size", None)) or 4 * hidden
    experts = _largest(getattr(shape, "num_experts_per_tok", None))
    inner = max(inner, experts * (_largest(getattr(shape, "moe_intermediate_size", None)) or inner))
    whole = 24 * hidden + 6 * inner  # with what its backward pass makes
    if checkpointing is True:
        return float(2 * hidden * layers + whole)
    return float((24 * hidden + (0 if checkpointing == "mlp" else 4 * inner)) * layers + whole)


def _largest(size: Any) -> int:
    """Of a size of a model's layers, which may be a list; 0 where there is none."""
    return max(size, default=0) if isinstance(size, list | tuple) else int(size or 0)


def _whole_size(parameter: torch.nn.Parameter) -> int:
    """Also where ZeRO 3 has left a part of it here."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def _least_of_all(numbers: list[int], ranks: Ranks, device: torch.device) -> list[int]:
    """GPUs may differ, and every rank has as many micro-batches, and gathers weights as often."""
    if ranks.world_size == 1:
        return numbers
    found = torch.tensor(numbers, device=device)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN)
    return [int(number) for number in found]
