"""Requests for samples by adapters that tenants saved, and their answers."""

from dataclasses import dataclass

import numpy as np

from trinity.data.experience import SamplingParams

NO_LOGPROB = -99999.0  # of an empty cell, whose token is 0


@dataclass(frozen=True)
class Sample:
    """A request. Fields as in explorer.v1.SampleRequest; `version` 0 is the base model."""

    version: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int = 0
    tenant: str = ""


@dataclass(frozen=True)
class Top:
    """The most likely tokens of N positions: token_ids int32 [N, k], logprobs float32 [N, k] with NO_LOGPROB where a
    position has fewer."""

    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class Sampled:
    """One sequence: tokens int32 [R], logprobs float32 [R]. stopped: False if it has max_tokens."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stopped: bool
    top: Top | None = None


@dataclass(frozen=True)
class Samples:
    """An answer. prompt_logprobs: float32 [P], NaN where none was computed.

    cached: prompt tokens whose key-value blocks the engine had.
    """

    sequences: tuple[Sampled, ...]
    prompt_logprobs: np.ndarray | None = None
    top_prompt: Top | None = None
    cached: int = 0
