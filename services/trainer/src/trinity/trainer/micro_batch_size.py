"""How many tokens a micro-batch has on a GPU where the YAML does not say.

A micro-batch takes Python and DeepSpeed as long whatever is in it: 0.3 s were seen for 24 layers, in which an H200
learns from 30,000 tokens of a 0.5 B model. So micro-batches are as large as is worth it, if activations have room.
"""

from typing import Any

import structlog
import torch

from trinity.config import Plan
from trinity.config.memory import Sharding, training_gib
from trinity.trainer.model import TokenModel
from trinity.trainer.ranks import Ranks

log = structlog.get_logger(__name__)

_GIB = 2**30
# Parameters x tokens that keep a large GPU busy while the next micro-batch is put to it.
_WORTH, _LEAST, _MOST = 2.5e13, 16_384, 65_536
_RESERVE_GIB = 4.0  # CUDA, NCCL, gradients that are exchanged, logits of a chunk
_SHARE = 0.5  # of what is left: the estimate of activations knows only the usual layers


def micro_batch_tokens(plan: Plan, model: TokenModel, ranks: Ranks, memory: int | None) -> int:
    """At most so many tokens. A collective. `memory`: of this rank's GPU, in bytes; None: it has none.

    As the YAML says; else twice the model's length, and on GPUs more of it where that is packed and fits.
    """
    least, trainer = plan.micro_batch_tokens, plan.config.trainer
    if trainer.max_token_len_per_gpu is not None or not trainer.use_dynamic_bsz or memory is None or not model.packed:
        return least
    count = sum(_whole_size(parameter) for parameter in model.parameters())
    room = memory - (training_gib(plan, count, Sharding.of(plan, ranks.world_size)) + _RESERVE_GIB) * _GIB
    each = activation_bytes(model.model.config.get_text_config(), trainer.gradient_checkpointing)
    if trainer.deepspeed.dtype == "float32":
        each *= 2
    fits = int(_SHARE * room / each) if each else 0
    worth = max(_LEAST, min(_MOST, int(_WORTH / count)))
    tokens = _least_of_all(max(least, min(worth, fits)), ranks)
    log.info("trainer.micro_batches.sized", tokens=tokens, fits=fits, worth=worth)
    return tokens


def activation_bytes(shape: Any, checkpointing: bool | str) -> float:
    """Of a token in bfloat16, kept until the backward pass; 0 where the model's shape is not known.

    A layer keeps 12 hidden and 2 intermediate states. Made anew as a whole it keeps the hidden state it began with, and
    one layer at a time has all; of MLPs the intermediate ones are made anew.
    """
    hidden, layers = getattr(shape, "hidden_size", None), getattr(shape, "num_hidden_layers", None)
    if not hidden or not layers:
        return 0.0
    inner = getattr(shape, "intermediate_size", None) or 4 * hidden
    whole = 24 * hidden + 6 * inner  # with what its backward pass makes
    if checkpointing is True:
        return float(2 * hidden * layers + whole)
    return float((24 * hidden + (0 if checkpointing == "mlp" else 4 * inner)) * layers + whole)


def _whole_size(parameter: torch.nn.Parameter) -> int:
    """Also where ZeRO 3 has left a part of it here."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def _least_of_all(tokens: int, ranks: Ranks) -> int:
    """GPUs may differ, and every rank has as many micro-batches."""
    if ranks.world_size == 1:
        return tokens
    found = torch.tensor(tokens, device="cuda")
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN)
    return int(found)
