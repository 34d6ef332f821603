"""The policy: a Hugging Face causal language model whose head gives log-probabilities instead of logits."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.dropout import _DropoutNd

from trinity.config.memory import quantization_of
from trinity.config.schema.model import ModelConfig
from trinity.data.rope import rope_parameters
from trinity.data.vision import has_tower, reads_images
from trinity.runtime.errors import InvalidInput
from trinity.trainer.data.microbatch import MicroBatch
from trinity.trainer.model import attention
from trinity.trainer.model.four_bit import four_bit_layers, hold_in_four_bits
from trinity.trainer.model.fused import fuse, is_lean, wants_kernels
from trinity.trainer.model.logprobs import chunked_logprobs
from trinity.trainer.model.lora import adapter_weights, add_adapters, without_adapters
from trinity.trainer.model.router_replay import RouterReplay
from trinity.trainer.model.sequence_parallel import SequenceGroup
from trinity.trainer.model.vision import has_vision, hidden_states, text_body
from trinity.weights.adapters import why_no_base
from trinity.weights.lora import Lora

log = structlog.get_logger(__name__)


class _Head(nn.Module):
    """Replaces the output projection and owns its weight, so that ZeRO-3 gathers the weight when the head is called."""

    def __init__(self, projection: nn.Linear, config: Any, chunk: int, in_float32: bool, fused: bool) -> None:
        super().__init__()
        self.weight = projection.weight
        self.cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.divisor = (getattr(config, "logits_scaling", None) or 1.0) / (getattr(config, "logit_scale", None) or 1.0)
        self.chunk = chunk
        self.in_float32 = in_float32
        self.fused = fused
        self.compares = False

    def forward(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        others: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        found = self._computed(hidden, self.weight, targets, temperatures, self.in_float32, others)
        if not self.compares:
            return found
        if self.in_float32 or hidden.dtype is torch.float32:
            compared = self._computed(hidden.bfloat16(), self.weight.bfloat16(), targets, temperatures, False)
        else:
            compared = self._computed(hidden, self.weight, targets, temperatures, True)
        return found[0], compared[0]

    def _computed(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        in_float32: bool,
        others: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        temperatures, chunk = temperatures * self.divisor, self.chunk
        return chunked_logprobs(hidden, weight, targets, temperatures, chunk, in_float32, self.fused, self.cap, others)


class TokenModel(nn.Module):
    """A Hugging Face model and a head that reads its hidden states at the positions that predict tokens.

    packed: True if it reads packed micro-batches. lean: True if its layers keep little for the backward pass
    (fused.is_lean). Parameter names are those of the checkpoint with the prefix `model.`.
    """

    PREFIX = "model."

    def __init__(self, model: Any, packed: bool = False, group: SequenceGroup | None = None) -> None:
        super().__init__()
        self.model: Any = model
        self.packed = packed
        self.group = group
        self.lean = False
        self.replay: RouterReplay | None = None

    def hidden(self, micro: MicroBatch) -> tuple[MicroBatch, torch.Tensor]:
        """Returns this rank's part of the micro-batch, and the hidden states [n, H] of its n predictions.

        `gather` places the values computed from them in [B, R].
        """
        if self.group is not None:
            micro = micro.part(self.group.rank, self.group.size)
        if self.replay is not None:
            self.replay.routes = micro.routes
        kind: dict[str, Any] = {"attention_mask": micro.attention_mask}
        if micro.packed:
            kind["packing"] = attention.Packing(micro.boundaries, micro.lengths, self.group, micro.shared)
        if has_vision(self.model):
            states = hidden_states(self.model, micro, **kind)
        else:
            states = text_body(self.model)(
                input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False, **kind
            )[0]
        return micro, states.reshape(-1, states.shape[-1])[micro.predicting]

    def gather(self, micro: MicroBatch, values: torch.Tensor) -> torch.Tensor:
        """Joins the values [n] of the parts of all ranks to [B, R]."""
        spread = micro.spread(values)
        return spread if self.group is None else self.group.sum(spread)

    def weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields parameters by their name in the checkpoint, in checkpoint order; tied parameters once."""
        for name, parameter in self.named_parameters():
            yield name.removeprefix(self.PREFIX), parameter

    def fixed(self) -> list[tuple[str, torch.Tensor]]:
        """Buffers of a checkpoint, such as a router's correction, which training does not change."""
        kept = self.state_dict(keep_vars=True)
        return [(name.removeprefix(self.PREFIX), buffer) for name, buffer in self.named_buffers() if name in kept]


class PolicyModel(TokenModel):
    """Computes the log-probability of every response token."""

    def __init__(
        self,
        model: Any,
        chunk: int,
        packed: bool = False,
        group: SequenceGroup | None = None,
        head_in_float32: bool = False,
        fused: bool = False,
    ) -> None:
        super().__init__(model, packed, group)
        projection = model.get_output_embeddings()
        if not isinstance(projection, nn.Linear) or projection.bias is not None:
            raise InvalidInput("model.model_path", "its output projection is not a plain matrix; not supported")
        head = _Head(projection, model.config.get_text_config(), chunk, head_in_float32, fused)
        model.set_output_embeddings(head)
        self.lora: Lora | None = None

    @property
    def head(self) -> nn.Module:
        found: nn.Module = self.model.get_output_embeddings()
        return found

    def forward(self, micro: MicroBatch, with_top: bool = False) -> tuple[torch.Tensor, ...]:
        """Returns each response token's log-probability, and the entropy of its distribution.

        Both are float32 [B, R] and 0 after each response's end. with_top: and the log-probabilities of `top_ids`,
        float32 [B, R, k].
        """
        micro, hidden = self.hidden(micro)
        others = micro.top_ids if with_top else None
        found = self.head(hidden, micro.targets, micro.token_temperatures, others)
        return tuple(self.gather(micro, values) for values in found)

    def weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters, or with LoRA only the adapters, by their names in peft's files."""
        return super().weights() if self.lora is None else adapter_weights(self.model)

    @contextmanager
    def both_heads(self) -> Iterator[None]:
        """Makes `forward` return log-probabilities by another head in place of the entropy.

        That head computes in bfloat16 if the usual one computes in float32, and vice versa.
        """
        head = self.model.get_output_embeddings()
        head.compares = True
        try:
            yield
        finally:
            head.compares = False

    def base(self) -> AbstractContextManager[None]:
        """Makes the model compute without its adapters."""
        return without_adapters(self.model)


def load_policy(
    config: ModelConfig,
    dtype: torch.dtype,
    chunk: int,
    *,
    packed: bool = False,
    group: SequenceGroup | None = None,
    head_in_float32: bool = False,
    fused: bool | None = False,
    weights: bool = True,
    replay: bool = False,
    device: torch.device | None = None,
) -> PolicyModel:
    """Loads the model in `model_path`. Raises InvalidInput if transformers cannot load it.

    weights: without them the parameters have no values, and a hub's files stay there.

    packed: let it read packed micro-batches if its attention allows; the result's `packed` tells. chunk: maximum number
    of tokens whose logits exist at a time. fused: use fused kernels (fused.py); None: if the model is large enough.
    replay: send tokens to the experts that micro-batches have recorded. device: where a base of four bits is made, and
    held; None: the CPU.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind: Any = AutoModelForImageTextToText if has_tower(config.model_path) else AutoModelForCausalLM
    model = from_pretrained(kind, "model.model_path", config.model_path, config, dtype, weights)
    attention.choose_attention(model)
    with_kernels = not has_vision(model) and wants_kernels(model, fused)
    lean = with_kernels and is_lean(model, fuse(model))
    packed = packed and pack(model, group)
    policy = PolicyModel(model, chunk, packed, group, head_in_float32, with_kernels)
    policy.lean = lean
    policy.replay = RouterReplay(model) if replay else None
    if config.lora is not None:
        held = four_bit_layers(policy.model) if config.in_four_bits else []
        policy.lora = add_adapters(policy.model, config.lora, dtype, config.model_path)
        if weights:
            hold_in_four_bits(policy.model, held, device or torch.device("cpu"))
    return policy


def from_pretrained(kind: Any, key: str, path: str, config: ModelConfig, dtype: torch.dtype, weights: bool) -> Any:
    """Loads a model by a class of transformers; see load_policy. Raises InvalidInput at this key of the YAML.

    The result's `reads_images` tells whether it does.
    """
    found = _loaded(kind, key, path, config, dtype, weights)
    own = found.config
    found.reads_images = hasattr(own, "vision_config") and reads_images(own.model_type, config.images)
    return found


def _loaded(kind: Any, key: str, path: str, config: ModelConfig, dtype: torch.dtype, weights: bool) -> Any:
    from transformers import AutoConfig

    options: dict[str, Any] = {"dtype": dtype}
    options["trust_remote_code"] = config.trust_remote_code
    if problem := why_no_base(path):
        raise InvalidInput(key, problem)
    try:
        rope = config_with_rope(config) if key == "model.model_path" else {}
        own = rope.get("config") or AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        if quantization_of(path):
            return _dequantized(kind, key, path, own, options, weights)
        if weights or Path(path).expanduser().is_dir():
            return _read(kind, key, path, **options, **rope, **({} if weights else {"device_map": {"": "meta"}}))
        with torch.device("meta"):
            return kind.from_config(own, **options)
    except (InvalidInput, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers, safetensors and a model's own code raise what they like
        reason = _unknown_type(path, config.trust_remote_code) or " ".join(str(error).split())
        kind_of_error = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise InvalidInput(key, f"{path!r} cannot be loaded: {kind_of_error}{reason}") from error


def _read(kind: Any, key: str, path: str, **options: Any) -> Any:
    """Reads a checkpoint. Raises InvalidInput for parameters that it lacks, which transformers makes up."""
    model, found = kind.from_pretrained(path, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    if missing := sorted(found["missing_keys"] & {name for name, _ in model.named_parameters()}):
        others = sorted(found["unexpected_keys"])
        instead = f"; it has others, such as {others[0]}" if others else ""
        what = f"lacks {len(missing)} tensors of {type(model).__name__}, such as {missing[0]}{instead}"
        raise InvalidInput(key, f"{path!r} {what}; save the model again with save_pretrained")
    for name, there, due in sorted(found["mismatched_keys"]):
        what = f"has {name} {list(there)}, which by its config.json is {list(due)}; correct config.json"
        raise InvalidInput(key, f"{path!r} {what}, or save the model again with save_pretrained")
    return model


def _unknown_type(path: str, trusts_code: bool) -> str:
    """Returns the fix for a model whose model_type transformers does not know; empty for a known one."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig, __version__

    try:
        own, _ = PreTrainedConfig.get_config_dict(path)
    except (OSError, ValueError):
        return ""
    kind = own.get("model_type")
    if not kind or kind in CONFIG_MAPPING:
        return ""
    if "auto_map" in own and not trusts_code:
        fix = "model.trust_remote_code: true runs the code that the checkpoint has"
    else:
        fix = "a newer one may (pip install -U transformers), or choose another model"
    return f"transformers {__version__} does not know its model_type {kind!r}; {fix}"


def _dequantized(kind: Any, key: str, path: str, own: Any, options: dict[str, Any], weights: bool) -> Any:
    """Loads weights of four bits as `options["dtype"]`. Raises InvalidInput for other quantized weights."""
    method = quantization_of(path)
    if method != "mxfp4":
        raise InvalidInput(key, f"{path!r} is quantized ({method}); only bfloat16 and mxfp4 weights are trained")
    if not weights:
        del own.quantization_config
        with torch.device("meta"):
            return kind.from_config(own, **options)
    from transformers.utils.quantization_config import Mxfp4Config

    model = _read(kind, key, path, config=own, quantization_config=Mxfp4Config(dequantize=True), **options)
    model._weight_conversions = None  # transformers 5.19 would name experts by the pattern of its quantizer
    return model.to(options["dtype"])


def config_with_rope(model: ModelConfig) -> dict[str, Any]:
    """Returns the argument `config` of from_pretrained if the YAML replaces rotary positions; else no argument."""
    if not model.rope:
        return {}
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model.model_path, trust_remote_code=model.trust_remote_code)
    config.rope_parameters = rope_parameters(model.rope, config)
    return {"config": config}


def pack(model: Any, group: SequenceGroup | None) -> bool:
    """Makes a transformers model read packed micro-batches if its attention allows; returns False and logs why not.

    Raises InvalidInput for a model that cannot if ranks share sequences (`group`), which must be packed.
    """
    if group is not None:
        attention.check_sequence_parallel(model, group.size)
    reason = attention.why_not_packed(model)
    if reason is not None:
        log.warning("trainer.model.padded", reason=reason)
        return False
    attention.replace_attention(text_body(model))
    return True


def disable_dropout(model: nn.Module, name: str) -> None:
    """Sets every dropout and layer drop of a transformers model to 0, in its modules and its config.

    Engines sample without dropout. With it the same weights would give other log-probabilities, and their ratio to the
    engine's would not be 1. Without it a step has no randomness, so a resumed run needs no generator state.
    """
    was: dict[str, float] = {}
    for holder, attribute in _rates(model):
        rate = getattr(holder, attribute)
        label = type(holder).__name__ if attribute == "p" else attribute
        was[label] = max(rate, was.get(label, 0.0))
        setattr(holder, attribute, 0.0)
    if was:
        log.info("trainer.model.dropout", model=name, was=was, now=0.0)


def _rates(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yields objects with a rate above 0, and the rate's attribute: `p` of Dropout, or any with "drop" in its name."""
    modules = list(model.modules())
    configs = {id(config): config for module in modules if (config := getattr(module, "config", None)) is not None}
    for holder in (*modules, *configs.values()):
        for name, value in list(vars(holder).items()):
            named = "drop" in name or (name == "p" and isinstance(holder, _DropoutNd))
            if named and isinstance(value, float) and value > 0:
                yield holder, name


class OffloadedReference:
    """A reference model in host memory, copied to the device only while it is used (`offload_reference`).

    The model is frozen, so the copy is discarded and nothing is written back.
    """

    def __init__(self, model: PolicyModel, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._copy: dict[str, torch.Tensor] = {}
        if device.type == "cuda":
            for _, tensor in self._tensors():
                tensor.data = tensor.data.pin_memory()

    def __call__(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the model's forward; valid within `on_device`."""
        found: tuple[torch.Tensor, torch.Tensor] = functional_call(self._model, self._copy, (micro,))
        return found

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Copies the model to the device as a context. Raises torch.OutOfMemoryError."""
        try:
            for name, tensor in self._tensors():
                self._copy[name] = tensor.to(self._device, non_blocking=True)
            yield
        finally:
            self._copy.clear()

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields parameters and buffers; tied ones once."""
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()
