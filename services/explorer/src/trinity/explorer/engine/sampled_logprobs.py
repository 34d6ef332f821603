"""Computes only the log-probability of the sampled token, in vLLM's workers.

vLLM also ranks the token among the whole vocabulary, and computes the normalisation in one serial loop a row. Both take
about half of a decoding step of a small model on an H200. Ranks are unused here, and the normalisation is one
reduction: the whole GPU reads every row once, in parts and in its own dtype. Requests for more than the sampled token
use vLLM's own code.
"""

from typing import Any

import torch
from vllm.triton_utils import HAS_TRITON
from vllm.v1.outputs import LogprobsTensors

_ROWS = 256  # rows of logits in float32 at the same time, without Triton


def sampled_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [B, 1]: logits[b, token_ids[b]] - log sum exp logits[b]. logits [B, V], -inf where excluded."""
    if HAS_TRITON and logits.is_cuda:
        from trinity.explorer.engine.sampled_logprobs_kernels import of_rows

        return of_rows(logits, token_ids)
    parts = [
        part.gather(-1, ids[:, None]).float() - torch.logsumexp(part.float(), -1, keepdim=True)
        for part, ids in zip(logits.split(_ROWS), token_ids.long().split(_ROWS), strict=True)
    ]
    return torch.cat(parts)


def install() -> None:
    """Patch both of vLLM's samplers. A vLLM that has neither of the patched functions keeps its own."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.sampler import Sampler

    if hasattr(rejection_sampler, "expand_batch_to_tokens"):
        mended = without_kernel(rejection_sampler.expand_batch_to_tokens)
        setattr(rejection_sampler, "expand_batch_to_tokens", mended)  # noqa: B010
    Sampler.gather_logprobs = staticmethod(_in_place_of(Sampler.gather_logprobs))  # type: ignore[method-assign]
    try:
        from vllm.v1.worker.gpu.sample import sampler
    except ImportError:
        return
    if hasattr(sampler, "compute_topk_scores"):
        setattr(sampler, "compute_topk_scores", _instead_of_scores(sampler.compute_topk_scores))  # noqa: B010


def without_kernel(expand: Any) -> Any:
    """Make a function of the rejection sampler work on a CPU too.

    On a CPU, vLLM 0.32's kernel writes into a copy that is discarded, so draft tokens would be judged at temperatures
    and top-p from uninitialised memory.
    """

    def expand_batch_to_tokens(
        x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        if x.is_cuda:
            on_gpu: torch.Tensor = expand(x, cu_num_tokens, num_tokens, replace_from, replace_to)
            return on_gpu
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts, output_size=num_tokens)

    return expand_batch_to_tokens


def _in_place_of(gather: Any) -> Any:
    """Patch for the first model runner's sampler, whose log-probabilities are already normalised."""

    def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
        if num_logprobs:
            found: LogprobsTensors = gather(logprobs, num_logprobs, token_ids)
            return found
        ids = token_ids[:, None]
        return LogprobsTensors(ids.to(torch.int32), logprobs.gather(-1, ids), _no_ranks(token_ids))

    return gather_logprobs


def _instead_of_scores(compute: Any) -> Any:
    """Patch for the second model runner's sampler."""

    def compute_topk_scores(
        logits: torch.Tensor, num_logprobs: int, sampled_token_ids: torch.Tensor, cu_num_logits: Any = None, *rest: Any,
        max_per_req_token_ids: int = 0, logits_mode: bool = False, **others: Any,
    ) -> LogprobsTensors:  # fmt: skip
        if num_logprobs or max_per_req_token_ids or logits_mode or rest or isinstance(cu_num_logits, torch.Tensor):
            found: LogprobsTensors = compute(
                logits, num_logprobs, sampled_token_ids, cu_num_logits, *rest,
                max_per_req_token_ids=max_per_req_token_ids, logits_mode=logits_mode, **others,
            )  # fmt: skip
            return found
        scores = sampled_logprobs(logits, sampled_token_ids)
        ranks = _no_ranks(sampled_token_ids)
        return LogprobsTensors(sampled_token_ids.unsqueeze(-1), scores, ranks, cu_num_logits)

    return compute_topk_scores


def _no_ranks(token_ids: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(token_ids), dtype=torch.int64, device=token_ids.device)
