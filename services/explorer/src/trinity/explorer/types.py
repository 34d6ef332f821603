"""Inputs and results of an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trinity.config.memory import has_delta_networks
from trinity.config.schema.explorer import RolloutModelConfig
from trinity.data.experience import VersionSpan
from trinity.data.top_tokens import TopTokens
from trinity.data.vision import ImageRules
from trinity.runtime.errors import TrinityError

# Key in a vLLM request's extra_args: its log-probabilities are recorded, and not read by a client.
UNREAD_LOGPROBS = "trinity_unread_logprobs"

# vLLM's load_format of a base model whose matrices have the values of NF4 (worker.py).
FOUR_BIT = "trinity_nf4"


class EngineFailed(TrinityError):
    """vLLM raised an error, or its core is gone. The process must be restarted."""


def is_refusal(error: Exception) -> bool:
    """Returns True if vLLM refuses a request. Its own classes of refusals are no ValueError in newer versions."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return not names.isdisjoint({"ValueError", "VLLMClientError", "VLLMValidationError"})


@dataclass(frozen=True)
class Taught:
    """A teacher's log-probabilities of the tokens after a prompt, float32 [R], at temperature 1.

    top: its likeliest tokens in each place; None if none were asked for.
    """

    logprobs: np.ndarray
    top: TopTokens | None = None

    @classmethod
    def of(cls, tokens: Sequence[int], places: Sequence[Mapping[int, float]], top: int) -> "Taught":
        """places: log-probabilities by token id, of each place's token and of its `top` likeliest tokens."""
        logprobs = np.array([place[token] for place, token in zip(places, tokens, strict=True)], np.float32)
        if not top:
            return cls(logprobs)
        likeliest = [sorted(place.items(), key=lambda one: -one[1])[:top] for place in places]
        found = np.array(likeliest, np.float64).reshape(len(places), top, 2)
        values = np.minimum(found[..., 1], 0.0).astype(np.float32)
        return cls(logprobs, TopTokens(found[..., 0].astype(np.int32), values))


@dataclass(frozen=True)
class Completion:
    """R sampled tokens. token_ids int32 [R], logprobs float32 [R] at the sampling temperature.

    `version_spans` have serials of loads if an Engine made it, and weight versions if an EnginePool made it. routes
    [P + R - 1, layers, chosen]: experts of the prompt's and the sampled tokens but the last; None if not recorded.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str  # "stop" or "length"
    routes: np.ndarray | None = None


@dataclass(frozen=True)
class EngineUsage:
    """The load of vLLM's scheduler: running and waiting sequences, and the used part of the cache (0 to 1)."""

    running: int = 0
    waiting: int = 0
    kv_cache_ratio: float = 0.0


@dataclass(frozen=True)
class EngineOptions:
    """Options of one engine."""

    model: str
    device: str  # "cpu" or "cuda"
    max_model_len: int
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    seed: int = 0
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    gpu_memory_utilization: float = 0.9
    gpu_memory_gib: float = 0  # on each GPU shared with a trainer; 0: gpu_memory_utilization counts
    memory_key: str = ""  # key of gpu_memory_gib, for users who have no gpu_memory_utilization
    cpu_kvcache_gib: float = 1.0
    max_num_seqs: int | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # further options of vLLM
    trust_remote_code: bool = False
    weights_change: bool = True  # False for auxiliary models that follow no run
    pooling: bool = False  # the model rates instead of writing
    rope: Mapping[str, Any] = field(default_factory=dict)  # ModelConfig.rope
    images: ImageRules | None = None  # None: the model reads no images
    turn_end: int | None = None  # the chat template's end of a reply, at which sampling stops as at the model's eos
    routes: bool = False  # record the experts of every token
    adapters: int = 0  # slots for unmerged adapters; 0: weights are loaded into the model
    adapter_rank: int = 0  # the largest rank of an adapter
    keeps_before: bool = False  # the version before the newest stays among the adapters
    base_in_four_bits: bool = False  # the base model has the values of NF4, as the trainer's
    reproducible: bool = False  # results do not depend on the other sequences of a batch
    rates_whole: bool = False  # a prompt of max_model_len tokens may be rated; vLLM itself wants room for one more
    top: int = 0  # likeliest tokens that `Engine.teach` gives in each place

    @classmethod
    def of(cls, config: RolloutModelConfig, *, device: str, **others: Any) -> "EngineOptions":
        """Options of a model's section of the YAML. An engine on a CPU is not split."""
        given = {name: getattr(config, name) for name in RolloutModelConfig.model_fields if name in cls.__annotations__}
        if device == "cpu":
            given["tensor_parallel_size"] = 1
        return cls(device=device, **given, **others)

    @property
    def engine_dtype(self) -> str:
        """The YAML's dtype; by default bfloat16 on GPUs, and float32 on CPUs.

        vLLM's gated delta networks on CPUs have only bfloat16.
        """
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.device == "cpu" and not has_delta_networks(self.model) else "bfloat16"

    @property
    def precision(self) -> str:
        """The engine's dtype, or what its weights and its cache are quantized to, as in common.v1.VersionSpan."""
        weights = self.engine_args.get("quantization") or self.engine_dtype
        cache = self.engine_args.get("kv_cache_dtype") or "auto"
        return f"{weights}" if cache in ("auto", self.engine_dtype) else f"{weights}, cache {cache}"


def spans_of(ends: Sequence[tuple[VersionSpan, int]]) -> tuple[VersionSpan, ...]:
    """Spans with these ends. Each begins at the end before; adjacent ones of a version and precision are merged."""
    spans: list[VersionSpan] = []
    for span, end in ends:
        if spans and (spans[-1].version, spans[-1].precision) == (span.version, span.precision):
            spans[-1] = replace(spans[-1], end=end)
        else:
            spans.append(replace(span, start=spans[-1].end if spans else 0, end=end))
    return tuple(spans)
