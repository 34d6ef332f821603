"""One vLLM engine: AsyncLLM in this process, its core in a child.

    start -> generate ... (load in between) -> close

`load` pauses sampling with the running requests kept, loads, and resumes: a response may be sampled by several versions
and says so per token. The prefix cache is salted with the version, so no key-value block of old weights is reused.
"""

import asyncio
import os
import time
import uuid
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import structlog

from trinity.explorer.engine.types import Completion, EngineOptions
from trinity.runtime.errors import InvalidInput, TrinityError
from trinity.runtime.experience import SamplingParams, VersionSpan

log = structlog.get_logger(__name__)

_WORKER = "trinity.explorer.engine.worker"


class EngineFailed(TrinityError):
    """vLLM raised, or its core is gone. The process must be started anew."""


class Engine:
    """A running engine. Made by `start`."""

    def __init__(self, llm: Any, options: EngineOptions) -> None:
        self.llm = llm
        self.options = options
        self.version = 0
        self.tokens_generated = 0
        self._spans = _SpanTracker(native=hasattr(llm, "update_weight_version"))
        self._loading = asyncio.Lock()

    @classmethod
    async def start(cls, options: EngineOptions, devices: str | None = None) -> "Engine":
        """Start vLLM; takes 30 to 60 seconds. `devices` is CUDA_VISIBLE_DEVICES of this engine."""
        begin = time.monotonic()
        llm = start_vllm(options, devices)
        engine = cls(llm, options)
        if engine._spans.native:
            await llm.update_weight_version("0")
        log.info("explorer.engine.started", model=options.model, seconds=round(time.monotonic() - begin, 1))
        return engine

    async def generate(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> list[Completion]:
        """`sampling.n` completions of one prompt. InvalidInput if it does not fit, EngineFailed if vLLM fails.

        At temperature 0 all of them are the same, so one is sampled.
        """
        from vllm import TokensPrompt

        if not prompt_token_ids:
            raise InvalidInput("prompt_token_ids", "is empty")
        if len(prompt_token_ids) + sampling.max_tokens > self.options.max_model_len:
            raise InvalidInput(
                "sampling.max_tokens",
                f"is {sampling.max_tokens} after a prompt of {len(prompt_token_ids)} tokens; "
                f"the model's length is {self.options.max_model_len}",
            )
        copies = sampling.n if sampling.temperature == 0 else 1
        sampling = replace(sampling, n=sampling.n // copies)
        request_id = uuid.uuid4().hex
        responses: dict[int, _Response] = {}
        async with self._loading:  # a request that waits for a load belongs to the new version
            prompt = TokensPrompt(prompt_token_ids=list(prompt_token_ids), cache_salt=f"v{self.version}")
            self._spans.begin(request_id, sampling.n, self.version)
        try:
            async for output in self.llm.generate(prompt, self._vllm_sampling(sampling), request_id=request_id):
                for part in output.outputs:
                    response = responses.setdefault(part.index, _Response())
                    response.add(part)
                    self._spans.take(request_id, part.index, len(response.token_ids))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if isinstance(error, ValueError) or type(error).__name__ == "VLLMValidationError":
                raise InvalidInput("sampling", str(error)) from error
            raise EngineFailed(f"vLLM failed: {type(error).__name__}: {error}") from error
        finally:
            starts = self._spans.end(request_id)
        completions = [responses[index].completion(starts.get(index, [])) for index in sorted(responses)]
        self.tokens_generated += sum(len(completion.token_ids) for completion in completions)
        return completions * copies

    def _vllm_sampling(self, sampling: SamplingParams) -> Any:
        from vllm import SamplingParams as VllmSampling
        from vllm.sampling_params import RequestOutputKind

        return VllmSampling(
            n=sampling.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k if sampling.top_k > 0 else -1,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            repetition_penalty=sampling.repetition_penalty,
            stop=list(sampling.stop) or None,
            ignore_eos=sampling.ignore_eos,
            seed=sampling.seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY if self._spans.native else RequestOutputKind.DELTA,
        )

    async def load(self, version: int, files: Sequence[str], tensors: Sequence[tuple[str, int]]) -> float:
        """Load a version from local safetensors files while requests run; returns the pause in seconds.

        `tensors` names every tensor and the index of its file, in layer order. If loading fails the engine stays
        paused: part of the weights may be new. Another `load` of a full version repairs it.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        update = WeightTransferUpdateRequest(update_info={"files": list(files), "tensors": [list(t) for t in tensors]})
        async with self._loading:
            begin = time.monotonic()
            await self.llm.pause_generation(mode="keep", clear_cache=False)
            await self._spans.mark(version)
            try:
                await self.llm.start_weight_update()
                await self.llm.update_weights(update)
                if self._spans.native:
                    await self.llm.finish_weight_update(weight_version=str(version))
                else:
                    await self.llm.finish_weight_update()
            except Exception as error:
                raise EngineFailed(f"loading version {version} failed, the engine is paused: {error}") from error
            self.version = version
            await self.llm.resume_generation()
            return time.monotonic() - begin

    async def check(self) -> None:
        """Raise EngineFailed if vLLM's core is gone."""
        try:
            await self.llm.check_health()
        except Exception as error:
            raise EngineFailed(f"vLLM is not healthy: {error}") from error

    def close(self) -> None:
        self.llm.shutdown()


def start_vllm(options: EngineOptions, devices: str | None) -> Any:
    """A running AsyncLLM. Raises EngineFailed."""
    with _environment(options, devices):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments: dict[str, Any] = {
            "model": options.model,
            "dtype": options.engine_dtype,
            "max_model_len": options.max_model_len,
            "tensor_parallel_size": options.tensor_parallel_size,
            "seed": options.seed,
            "enforce_eager": options.enforce_eager or options.device == "cpu",
            "enable_prefix_caching": options.enable_prefix_caching and not options.pooling,
            "enable_chunked_prefill": options.enable_chunked_prefill and not options.pooling,
            "trust_remote_code": options.trust_remote_code,
            "disable_log_stats": True,
        }
        if not options.pooling:
            arguments |= {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
        if options.weights_change:
            arguments["worker_extension_cls"] = f"{_WORKER}.WorkerExtension"
            arguments["weight_transfer_config"] = {"backend": "trinity"}
        if options.max_num_seqs:
            arguments["max_num_seqs"] = options.max_num_seqs
        if options.device == "cuda":
            arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
            arguments["attention_backend"] = "FLASH_ATTN"
        try:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except (ValueError, RuntimeError) as error:
            raise EngineFailed(f"vLLM did not start with {options.model}: {error}") from error


class _SpanTracker:
    """Which version sampled which tokens.

    vLLM from 0.32 says it itself (`native`). Before that, outputs are followed as they come, and at each pause the
    number of tokens every running completion has so far is where its next span begins.
    """

    def __init__(self, native: bool) -> None:
        self.native = native
        self._lengths: dict[str, dict[int, int]] = {}
        self._starts: dict[str, dict[int, list[tuple[int, int]]]] = {}

    def begin(self, request: str, n: int, version: int) -> None:
        if not self.native:
            self._lengths[request] = dict.fromkeys(range(n), 0)
            self._starts[request] = {index: [(0, version)] for index in range(n)}

    def take(self, request: str, index: int, length: int) -> None:
        if not self.native:
            self._lengths[request][index] = length

    def end(self, request: str) -> dict[int, list[tuple[int, int]]]:
        """(first token, version) of every span, by completion."""
        self._lengths.pop(request, None)
        return self._starts.pop(request, {})

    async def mark(self, version: int) -> None:
        """Everything sampled from here on is by `version`."""
        if self.native:
            return
        await asyncio.sleep(0.05)  # outputs sampled before the pause are still on their way
        for request, lengths in self._lengths.items():
            for index, length in lengths.items():
                self._starts[request][index].append((length, version))


class _Response:
    """One completion of a request, put together from what vLLM sends: all at once, or as it is sampled."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._last: Any = None

    def add(self, part: Any) -> None:
        self.token_ids.extend(part.token_ids)
        if part.logprobs is not None:
            self._logprobs.extend(part.logprobs.logprobs)
        self._last = part

    def completion(self, starts: list[tuple[int, int]]) -> Completion:
        """`starts` is where each version's span begins, for a vLLM that does not say it."""
        token_ids = np.asarray(self.token_ids, dtype=np.int32)
        logprobs = np.asarray(self._logprobs, dtype=np.float32)
        if len(logprobs) != len(token_ids):
            raise EngineFailed(f"vLLM gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
        native = getattr(self._last, "weight_versions", None)
        if native and not starts:
            spans = tuple(VersionSpan(int(s.version), s.start, s.end) for s in native if s.end > s.start)
        else:
            spans = spans_from(starts, len(token_ids))
        return Completion(token_ids, logprobs, spans, self._last.finish_reason or "stop")


def spans_from(starts: list[tuple[int, int]], length: int) -> tuple[VersionSpan, ...]:
    """Spans of a response of `length` tokens from (first token, version) of each; empty ones are left out."""
    ends = [start for start, _ in starts[1:]] + [length]
    return tuple(VersionSpan(v, start, end) for (start, v), end in zip(starts, ends, strict=True) if end > start)


@contextmanager
def _environment(options: EngineOptions, devices: str | None) -> Any:
    """Environment of vLLM's child processes while one engine starts."""
    values = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1"}
    if options.device == "cpu":
        values["VLLM_CPU_KVCACHE_SPACE"] = f"{max(1, round(options.cpu_kvcache_gib))}"
        # Compiling the few jitted helpers costs 20 s at the first batch and gains nothing measurable on a CPU.
        values["TORCH_COMPILE_DISABLE"] = "1"
    if devices is not None:
        values["CUDA_VISIBLE_DEVICES"] = devices
    values = {name: value for name, value in values.items() if name == "CUDA_VISIBLE_DEVICES" or name not in os.environ}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
