"""The scheduler in vLLM's engine core, which sends only complete responses (`DeferredOutputs`) and invalidates the
prefix cache at every pause.

New weights are loaded while the scheduler is paused, so no block from before a pause may serve a request that starts
after it. A salt of the client is not enough: a request that waits in vLLM's queue during a load still has the old salt.
`reset_prefix_cache` does not help either: it refuses while running requests hold blocks.

So every request's block hashes are salted with the number of pauses. Later requests do not find blocks from before the
pause, and these are evicted in time. A request that runs across the pause gets a unique salt, because its new blocks
depend on old blocks and new weights, and no other request may share them. Identifiers of image features are salted in
the same way.
"""

import time
from array import array
from hashlib import blake2b
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from trinity.explorer.engine.routes import RECORDER
from trinity.explorer.types import UNREAD_LOGPROBS

_REPORT_SECONDS = 1.0
_MAX_ABORTED = 1000  # kept responses of aborted requests, because vLLM reports no abort


class InvalidatePrefixCacheOnPause:
    """Mixed into vLLM's scheduler.

    Uses `requests`, and of a request `block_hashes`, `cache_salt`, `num_preemptions` and `mm_features`.
    """

    requests: dict[str, Any]
    _pauses = 0

    def set_pause_state(self, pause_state: PauseState) -> None:
        if pause_state is PauseState.PAUSED_ALL:
            self._pauses += 1
            for request in self.requests.values():
                self._mark(request)
        super().set_pause_state(pause_state)  # type: ignore[misc]

    def add_request(self, request: Request) -> None:
        self._mark(request)
        super().add_request(request)  # type: ignore[misc]

    def _mark(self, request: Any) -> None:
        """Later hashes are made from the last one, or from the salt if there is none yet."""
        owner = request.request_id if request.num_computed_tokens else ""
        mark = f"/{self._pauses}/{owner}"
        request.cache_salt = f"{request.cache_salt or ''}{mark}"
        # A hash keeps its length, by which vLLM's connector of recorded experts tells them apart.
        request.block_hashes[:] = [
            blake2b(block_hash + mark.encode(), digest_size=len(block_hash)).digest()
            for block_hash in request.block_hashes
        ]
        if not owner and not request.num_preemptions:  # the worker does not know its images yet
            for feature in request.mm_features:
                feature.identifier = f"{feature.identifier}{mark}"


class ReportsUsage:
    """Mixed into vLLM's scheduler. Its statistics are off, since they would cost a message at every step."""

    _report_at = 0.0

    def make_stats(self, *_: Any, **__: Any) -> SchedulerStats | None:
        """Requests and key-value cache, once a second."""
        if time.monotonic() < self._report_at:
            return None
        self._report_at = time.monotonic() + _REPORT_SECONDS
        scheduler: Any = self
        running, waiting = scheduler.get_request_counts()
        usage = scheduler.kv_cache_manager.usage
        return SchedulerStats(num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=usage)


_NEEDED = ("set_pause_state", "add_request", "update_from_output", "make_stats", "get_request_counts")


def make_scheduler(vllm_config: Any, **arguments: Any) -> Any:
    """The scheduler class that vLLM would choose for this configuration, with the mixins."""
    vllm_config.scheduler_config.scheduler_cls = None
    chosen: Any = vllm_config.scheduler_config.get_scheduler_cls()
    missing = [name for name in _NEEDED if not hasattr(chosen, name)]
    if missing or not hasattr(Request, "update_block_hashes"):
        raise RuntimeError(
            f"{chosen.__name__} of this vLLM has no {' and no '.join(missing) or 'block hashes'}: its prefix cache "
            "cannot be kept apart from new weights; use vLLM 0.26 to 0.32"
        )
    bases = (InvalidatePrefixCacheOnPause, ReportsUsage, DeferredOutputs, chosen)
    scheduler = type(f"Trinity{chosen.__name__}", bases, {})
    return scheduler(vllm_config=vllm_config, **arguments)


class DeferredOutputs:
    """Mixed into vLLM's scheduler: responses leave its core complete, with the number of loads before each token.

    vLLM sends a message with an id and three small arrays for every token of every request. On a fast GPU that takes as
    long as the model. If no client reads a response before its end, the engine core collects it and sends it with the
    last output. Then only the engine core knows which tokens came before a pause: it reports the number of loads before
    each token in the field of the token's rank, which is unused here. vLLM may read a long prompt in several steps. If
    a load comes between them, the first token counts for the weights that read the beginning of the prompt, because it
    depends on their keys and values.

    Uses `requests`, of a request `num_computed_tokens`, `add_request` and what `update_from_output` takes and returns.
    The GPU may idle while that runs, so a deferred token costs one append: no slice, copy or message.
    """

    requests: dict[str, Any]
    pause_state: PauseState

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._loads = 0
        self._responses: dict[str, _Response] = {}
        super().__init__(*args, **kwargs)

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Count a load at the end of its pause. Tokens that arrive before were sampled by the previous weights."""
        if pause_state is PauseState.UNPAUSED and self.pause_state is not PauseState.UNPAUSED:
            for response in self._responses.values():
                response.before_load(self._loads)
            self._loads += 1
        super().set_pause_state(pause_state)  # type: ignore[misc]

    def add_request(self, request: Any) -> None:
        if len(self._responses) > len(self.requests) + _MAX_ABORTED:
            self._responses = {name: self._responses[name] for name in self.requests if name in self._responses}
        if request.sampling_params is not None and request.sampling_params.num_logprobs is not None:
            self._responses[request.request_id] = _Response(request, self._loads)
        super().add_request(request)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's method gets no log-probabilities, because it would slice them for every token."""
        logprobs, model_runner_output.logprobs = model_runner_output.logprobs, None
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if logprobs is None:
            return outputs
        for of_client in outputs.values():
            of_client.outputs = self._to_send(of_client.outputs, logprobs, model_runner_output.req_id_to_index)
        return {client: found for client, found in outputs.items() if _has_content(found)}

    def _to_send(self, outputs: list[Any], logprobs: LogprobsLists, rows: dict[str, int]) -> list[Any]:
        """All outputs except unfinished parts of deferred responses."""
        sampled, starts = logprobs.logprobs[:, 0].tolist(), logprobs.cu_num_generated_tokens
        sent = []
        for output in outputs:
            name = output.request_id
            response = self._responses.get(name)
            if response is None:
                sent.append(output)
                continue
            if not response.deferred:
                if output.new_token_ids:
                    response.stream(output, logprobs, rows[name], self._loads)
                sent.append(output)
            elif output.new_token_ids:
                response.prefill = getattr(output, "prefill_stats", None) or response.prefill
                if (routes := getattr(output, "routed_experts", None)) is not None:
                    response.routes.append(routes)
                if starts is None:
                    response.logprobs.append(sampled[rows[name]])
                else:
                    start = starts[rows[name]]
                    response.logprobs.extend(sampled[start : start + len(output.new_token_ids)])
            if output.finish_reason is not None:
                del self._responses[name]
                if response.deferred:
                    response.fill(output)
                    sent.append(output)
                if name in RECORDER:
                    output.routed_experts = RECORDER.take(name, response.request.num_tokens - 1)
        return sent


class _Response:
    """The response of a request with log-probabilities, which waits for its end if it is `deferred`."""

    def __init__(self, request: Any, loads: int) -> None:
        self.request = request
        self.deferred = _is_deferred(request.sampling_params)
        self.logprobs = array("f")  # of every token so far
        self.loads = loads
        self.loads_before = array("l")  # for each further load, the number of tokens before it
        self.routes: list[np.ndarray] = []  # of the tokens so far, if vLLM records experts itself
        self.prefill: Any = None  # vLLM's counts of the prompt's tokens, which come with the first of them
        self.read_by: int | None = None  # loads before the first step of a prompt that was read across a load

    def before_load(self, loads: int) -> None:
        """A load is done; `loads` came before it."""
        self.loads_before.append(len(self.logprobs))
        if self.read_by is None and self.request.num_computed_tokens and not self.request.output_token_ids:
            self.read_by = loads

    def fill(self, output: Any) -> None:
        """Put the complete response into its last output."""
        count = len(self.logprobs)
        loads = self.loads + np.searchsorted(self.loads_before, np.arange(count), side="right")
        if self.read_by is not None:
            loads[:1] = self.read_by
        if self.prefill is not None:
            output.prefill_stats = self.prefill
        output.new_token_ids = list(self.request.output_token_ids)[:count]
        if self.routes:
            output.routed_experts = np.concatenate(self.routes)
        output.new_logprobs = LogprobsLists(
            np.array(output.new_token_ids, dtype=np.int32)[:, None],
            np.array(self.logprobs, dtype=np.float32)[:, None],
            loads.astype(np.int32),
        )

    def stream(self, output: Any, logprobs: LogprobsLists, row: int, loads: int) -> None:
        """Add log-probabilities to a streamed output."""
        found = logprobs.slice_request(row, len(output.new_token_ids))
        ranks = np.full_like(found.sampled_token_ranks, loads)
        if self.read_by is not None:
            ranks[:1], self.read_by = self.read_by, None
        output.new_logprobs = found._replace(sampled_token_ranks=ranks)


def _is_deferred(sampling: Any) -> bool:
    """True if a request only wants sampled tokens, only at its end, and the engine core detects the end."""
    return sampling.num_logprobs == 0 and sampling.output_kind is RequestOutputKind.FINAL_ONLY and not sampling.stop


def _has_content(of_client: Any) -> bool:
    return bool(of_client.outputs or of_client.finished_requests or of_client.scheduler_stats)


class WholeLogprobs(LogprobsProcessor):
    """Runs in the client's process. vLLM's processor works token by token; this one handles all tokens at once unless
    text is decoded.

    If a client also wants the best tokens, all entries of a position get the rank of the sampled token: vLLM joins
    outputs that were not read yet as dictionaries, in which a later entry of the same token replaces the first.
    """

    @classmethod
    def from_new_request(cls, tokenizer: Any, request: Any) -> LogprobsProcessor:
        """Skip the text of each token if the request has UNREAD_LOGPROBS: decoding takes longer than the rest."""
        unread = UNREAD_LOGPROBS in (request.sampling_params.extra_args or {})
        return super().from_new_request(None if unread else tokenizer, request)

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        found: Any = self.logprobs
        if self.tokenizer is not None or logprobs_lists.logprobs.shape[1] != 1 or not hasattr(found, "start_indices"):
            before = len(found)
            super()._update_sample_logprobs(logprobs_lists)
            if hasattr(found, "start_indices"):
                for start, end in zip(found.start_indices[before:], found.end_indices[before:], strict=True):
                    found.ranks[start:end] = [found.ranks[start]] * (end - start)
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
