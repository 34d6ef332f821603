"""Inputs and results of an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trinity.config.schema.explorer import RolloutModelConfig
from trinity.data.experience import VersionSpan
from trinity.data.vision import ImageRules
from trinity.runtime.errors import TrinityError

# Of a vLLM request's extra_args: its log-probabilities are recorded, and no client reads them.
UNREAD_LOGPROBS = "trinity_unread_logprobs"


class EngineFailed(TrinityError):
    """vLLM raised, or its core is gone. The process must be restarted."""


@dataclass(frozen=True)
class Completion:
    """R sampled tokens. token_ids int32 [R], logprobs float32 [R] at the sampling temperature.

    `version_spans` are of serials where it comes from an Engine, of weight versions where it comes from an EnginePool.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str  # "stop" or "length"


@dataclass(frozen=True)
class EngineUsage:
    """What vLLM's scheduler has to do: sequences that it samples, sequences in its queue; the used part of its
    key-value cache, 0 to 1."""

    running: int = 0
    waiting: int = 0
    kv_cache_ratio: float = 0.0


@dataclass(frozen=True)
class EngineOptions:
    """How to start one engine."""

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
    gpu_memory_gib: float = 0  # of each GPU, which a trainer shares; 0: gpu_memory_utilization says
    cpu_kvcache_gib: float = 1.0
    max_num_seqs: int | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # of vLLM's own
    trust_remote_code: bool = False
    weights_change: bool = True  # False: auxiliary models, which are never updated
    pooling: bool = False  # a model that rates instead of writing
    rope: Mapping[str, Any] = field(default_factory=dict)  # ModelConfig.rope
    images: ImageRules | None = None  # how the model reads them; None: not at all
    reproducible: bool = False  # results do not depend on the other sequences of a batch

    @classmethod
    def of(cls, config: RolloutModelConfig, *, device: str, **others: Any) -> "EngineOptions":
        """Of a model's part of the YAML. An engine on a CPU is not split."""
        given = {name: getattr(config, name) for name in RolloutModelConfig.model_fields if name in cls.__annotations__}
        if device == "cpu":
            given["tensor_parallel_size"] = 1
        return cls(device=device, **given, **others)

    @property
    def engine_dtype(self) -> str:
        """The dtype itself: bfloat16 on GPUs, float32 on CPUs, unless the YAML says otherwise."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.device == "cpu" else "bfloat16"


def spans_of(ends: Sequence[tuple[int, int]]) -> tuple[VersionSpan, ...]:
    """Of (version, end) of each: a span begins where the previous one ended; adjacent spans of a version are merged."""
    spans: list[VersionSpan] = []
    for version, end in ends:
        if spans and spans[-1].version == version:
            spans[-1] = replace(spans[-1], end=end)
        else:
            spans.append(VersionSpan(version, spans[-1].end if spans else 0, end))
    return tuple(spans)
