"""Inputs and results of an engine."""

from dataclasses import dataclass

import numpy as np

from trinity.data.experience import VersionSpan
from trinity.runtime.errors import TrinityError


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
    cpu_kvcache_gib: float = 1.0
    max_num_seqs: int | None = None
    trust_remote_code: bool = False
    weights_change: bool = True  # False: auxiliary models, which are never updated
    pooling: bool = False  # a model that rates instead of writing

    @property
    def engine_dtype(self) -> str:
        """The dtype itself: bfloat16 on GPUs, float32 on CPUs, unless the YAML says otherwise."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.device == "cpu" else "bfloat16"
