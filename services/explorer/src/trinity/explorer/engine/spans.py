"""Which load of weights sampled which tokens of a response. Spans here are of serials (see weights.loads)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trinity.data.experience import VersionSpan
from trinity.explorer.types import Completion, EngineFailed


def completion_of(part: Any, serials: Sequence[int]) -> Completion:
    """Tokens, log-probabilities and spans of a complete response. `serials`: of the weights after 0, 1, 2 ... loads.

    The number of loads before each token stands where vLLM has its rank (see held_outputs). An engine whose weights
    never change has one serial, and true ranks.
    """
    token_ids = np.asarray(part.token_ids, dtype=np.int32)
    found = part.logprobs
    logprobs = np.asarray(found.logprobs if found is not None else (), dtype=np.float32)
    if len(logprobs) != len(token_ids):
        raise EngineFailed(f"vLLM gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
    loads = np.asarray(found.ranks if found is not None and len(serials) > 1 else np.zeros(len(token_ids)), np.int64)
    changes = [0, *(np.flatnonzero(np.diff(loads)) + 1).tolist()]
    spans = spans_from([(start, serials[loads[start]]) for start in changes if start < len(loads)], len(token_ids))
    return Completion(token_ids, logprobs, spans, part.finish_reason or "stop")


def spans_from(starts: Sequence[tuple[int, int]], length: int) -> tuple[VersionSpan, ...]:
    """Spans of a response of `length` tokens from (first token, serial) of each; empty ones are left out."""
    ends = [start for start, _ in starts[1:]] + [length]
    return tuple(
        VersionSpan(serial, start, end) for (start, serial), end in zip(starts, ends, strict=True) if end > start
    )
