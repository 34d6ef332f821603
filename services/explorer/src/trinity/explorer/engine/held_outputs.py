"""Responses leave vLLM's engine core whole: ids, log-probabilities, and after how many loads each token was sampled.

vLLM sends, for every token of every request, a message with an id and three small arrays, which takes as long as the
model itself on a fast GPU. Where nobody reads a response before its end, all of it can wait in the engine core, beside
the request; the last output carries it. Since only the engine core knows then which tokens came before a pause, it says
so itself: in the place of a token's rank, which nobody here reads, stands the number of loads before it.

`HoldsOutputs` works in the engine core, `WholeLogprobs` in the process that asked.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists


class HoldsOutputs:
    """Mixed into vLLM's scheduler. Uses `requests`, `update_from_output` and that it slices `logprobs` by request."""

    requests: dict[str, Any]
    pause_state: PauseState
    _loads = 0

    def set_pause_state(self, pause_state: PauseState) -> None:
        """A pause ends when a load is done; until then tokens that were under way are by the weights before."""
        if pause_state is PauseState.UNPAUSED and self.pause_state is not PauseState.UNPAUSED:
            self._loads += 1
        super().set_pause_state(pause_state)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        logprobs = model_runner_output.logprobs
        if logprobs is None:
            return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        # Looked up before: requests that end are forgotten on the way.
        requests = {name: self.requests.get(name) for name in model_runner_output.req_ids}
        model_runner_output.logprobs = _Held(logprobs, list(requests.values()), self._loads)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for of_client in outputs.values():
            of_client.outputs = [
                output for output in of_client.outputs if _is_whole(output, requests.get(output.request_id))
            ]
        return outputs


class _Held:
    """In place of the LogprobsLists of one step. `requests`: in the order of its rows."""

    def __init__(self, logprobs: LogprobsLists, requests: Sequence[Any], loads: int) -> None:
        self._logprobs = logprobs
        self._requests = requests
        self._sampled = logprobs.logprobs[:, 0].tolist()
        self._starts = logprobs.cu_num_generated_tokens
        self._loads = loads

    def slice_request(self, index: int, count: int) -> LogprobsLists | None:
        """What a request has now: nothing yet, if its response waits."""
        request = self._requests[index]
        if not _waits(request):
            return self._marked(request, self._logprobs.slice_request(index, count))
        start = index if self._starts is None else self._starts[index]
        if not hasattr(request, "held_logprobs"):
            request.held_logprobs, request.held_loads = [], []
        request.held_logprobs.extend(self._sampled[start : start + count])
        request.held_loads.extend([self._loads] * count)
        return None

    def _marked(self, request: Any, found: LogprobsLists) -> LogprobsLists:
        """Who asks for more than the sampled token wants to read ranks."""
        if request is None or request.sampling_params is None or request.sampling_params.num_logprobs != 0:
            return found
        return found._replace(sampled_token_ranks=np.full_like(found.sampled_token_ranks, self._loads))


def _waits(request: Any) -> bool:
    """Only the sampled tokens are asked for, only at the end, and the end is seen by the engine core itself."""
    sampling = request.sampling_params if request is not None else None
    return (
        sampling is not None
        and sampling.num_logprobs == 0
        and sampling.output_kind is RequestOutputKind.FINAL_ONLY
        and not sampling.stop
    )


def _is_whole(output: Any, request: Any) -> bool:
    """Whether an output is to be sent now. The last one of a response that has waited is made to carry all of it."""
    if not _waits(request):
        return True
    if output.finish_reason is None:
        return False
    held, loads = getattr(request, "held_logprobs", []), getattr(request, "held_loads", [])
    tokens = list(request.output_token_ids)[: len(held)]
    output.new_token_ids = tokens
    output.new_logprobs = LogprobsLists(
        np.asarray(tokens, dtype=np.int32)[:, None],
        np.asarray(held, dtype=np.float32)[:, None],
        np.asarray(loads, dtype=np.int32),
    )
    return True


class WholeLogprobs(LogprobsProcessor):
    """vLLM's, which goes through a response token by token; here all at once where there is no text to make."""

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        found: Any = self.logprobs
        if self.tokenizer is not None or logprobs_lists.logprobs.shape[1] != 1 or not hasattr(found, "start_indices"):
            super()._update_sample_logprobs(logprobs_lists)
            return
        begin, count = len(found.logprobs), len(logprobs_lists.logprobs)
        found.start_indices.extend(range(begin, begin + count))
        found.end_indices.extend(range(begin + 1, begin + count + 1))
        found.token_ids.extend(logprobs_lists.logprob_token_ids[:, 0].tolist())
        found.logprobs.extend(logprobs_lists.logprobs[:, 0].tolist())
        found.ranks.extend(logprobs_lists.sampled_token_ranks.tolist())
        found.decoded_tokens.extend([None] * count)
        if self.cumulative_logprob is not None:
            self.cumulative_logprob += float(logprobs_lists.logprobs.sum())
