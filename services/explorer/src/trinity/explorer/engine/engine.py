"""A vLLM engine: AsyncLLM in this process, with its core in a child.

    start -> generate ... (load in between) -> close

`load` pauses sampling, keeps running requests, loads, and resumes. So a response may be sampled by several loads, and
records the load of every token. Each load has a unique serial. Every key-value block belongs to one load: the prefix
cache is salted with the serial, and invalidated at each pause (see scheduler.py).

An engine with slots for adapters never changes its base model: `load` swaps the policy's adapter without a pause, and a
response is sampled by the load with which it began (see adapters.py).
"""

import asyncio
import contextlib
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from trinity.data.experience import SamplingParams, VersionSpan
from trinity.data.images import PlacedImage, collapsed, placed, size
from trinity.data.vision import ImageRules
from trinity.explorer.engine.adapters import HeldAdapters, lay_out
from trinity.explorer.engine.images import DecodedImages
from trinity.explorer.engine.start import start_vllm
from trinity.explorer.engine.trial import BEFORE, POLICY
from trinity.explorer.types import Completion, EngineFailed, EngineOptions, EngineUsage, Taught, is_refusal, spans_of
from trinity.runtime.errors import Full, InvalidInput
from trinity.runtime.metrics import Counter

log = structlog.get_logger(__name__)

PROMPTS = Counter("trinity_explorer_prompt_tokens_total", "Tokens of workflows' prompts")
CACHED = Counter("trinity_explorer_prompt_tokens_cached_total", "Those of them whose key-value blocks the engine had")

_PROBE_SECONDS = 120.0
# Above these limits vLLM hangs. Loading reads the whole model, perhaps from a folder on another host.
_CALL_SECONDS = 120.0
_LOAD_SECONDS = 1800.0
_KILL_SECONDS = 0.1
_BEFORE_ALL_OTHERS = -1


@dataclass(frozen=True)
class LoadSeconds:
    """Durations of one load."""

    pausing: float
    loading: float
    resuming: float


@dataclass(frozen=True)
class Using:
    """The weights of one request. `arguments`: for AsyncLLM.generate.

    `serials[i]` is the serial of a token that the engine core sampled after `i` loads. Responses wait for the verdicts
    of the loads from `first` on; a served adapter has no such load.
    """

    salt: str
    serials: Sequence[int]
    first: int
    arguments: dict[str, Any] = field(default_factory=dict)


class Engine:
    """A running engine, made by `start`."""

    def __init__(self, llm: Any, options: EngineOptions) -> None:
        self.llm = llm
        self.options = options
        self.tokens_generated = 0
        self.serials = [0]  # serials of the weights before the first load, after it, after the second, ...
        self._loading = asyncio.Lock()
        self.last_load: LoadSeconds | None = None
        self.usage = EngineUsage()
        self._decoded = DecodedImages()
        self.adapters = HeldAdapters(llm, options.adapters)

    @classmethod
    async def start(cls, options: EngineOptions) -> "Engine":
        """Start one engine on the devices that this process sees, which takes 30 to 60 seconds."""
        (engine,) = await start_engines(options, [None])
        return engine

    def note_usage(self, stats: Any) -> None:
        """Called for every message of the engine core; few have statistics."""
        if stats is not None:
            self.usage = EngineUsage(stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        images: Sequence[PlacedImage] = (),
        adapter: str = POLICY,
    ) -> list[Completion]:
        """Sample `sampling.n` completions. Raises InvalidInput if they do not fit, EngineFailed if vLLM fails.

        images: all images in the prompt. adapter: a name that `adapters.load` got; by default the policy. At
        temperature 0 all completions are equal, so only one is sampled.
        """
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
        await self.after_load()
        async with self.using(adapter) as weights:
            try:
                prompt = await self.vllm_prompt(list(prompt_token_ids), images, weights.salt)
                params, name = self._vllm_sampling(sampling), uuid.uuid4().hex
                stream = self.llm.generate(prompt, params, request_id=name, **weights.arguments)
                outputs = [output async for output in stream]
            except (asyncio.CancelledError, InvalidInput):
                raise
            except Exception as error:
                if is_refusal(error):
                    raise InvalidInput("sampling", str(error)) from error
                raise EngineFailed(f"vLLM failed: {type(error).__name__}: {error}") from error
        parts = [part for output in outputs for part in output.outputs]
        completions = [completion_of(part, weights.serials) for part in sorted(parts, key=lambda part: part.index)]
        self._check_routes(len(prompt_token_ids), completions)
        CACHED.inc(max(output.num_cached_tokens or 0 for output in outputs))
        PROMPTS.inc(len(prompt_token_ids))
        self.tokens_generated += sum(len(completion.token_ids) for completion in completions)
        return completions * copies

    def _check_routes(self, prompt: int, completions: Sequence[Completion]) -> None:
        for made in completions if self.options.routes else ():
            found, expected = 0 if made.routes is None else len(made.routes), prompt + len(made.token_ids) - 1
            if found != expected:
                raise EngineFailed(f"vLLM gave the experts of {found} tokens, of {expected} that it read")

    async def vllm_prompt(self, token_ids: list[int], images: Sequence[PlacedImage], salt: str) -> Any:
        """The prompt of AsyncLLM.generate. Raises InvalidInput for images that the model cannot read.

        vLLM would take sampled tokens with the placeholder's id for images. So it renders the prompt with collapsed
        placeholders and other ids, and the true ids are put back.
        """
        from vllm import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=token_ids, cache_salt=salt)
        if not images:
            return prompt
        rules = self._rules(images)
        prompt["prompt_token_ids"] = collapsed(token_ids, images, rules)
        prompt["multi_modal_data"] = {"image": await asyncio.to_thread(self._decoded.of, images)}
        prompt["multi_modal_uuids"] = {"image": [image.digest.hex() for image in images]}
        (rendered,) = await self.llm.renderer.render_cmpl_async([prompt])
        found = [(place.offset, place.length) for place in rendered["mm_placeholders"]["image"]]
        if found != [(image.start, rules.tokens(*size(image.file))) for image in images]:
            raise EngineFailed("vLLM gives the prompt's images other numbers of tokens than the model's files say")
        return rendered | {"prompt_token_ids": token_ids}

    def _rules(self, images: Sequence[Any]) -> ImageRules:
        if self.options.images is None:
            raise InvalidInput("images", f"are {len(images)}, and {self.options.model} reads none")
        return self.options.images

    @contextlib.asynccontextmanager
    async def using(self, adapter: str = POLICY) -> AsyncIterator[Using]:
        """The weights of a request that runs until the context ends. Raises InvalidInput for an unknown adapter."""
        if not self.options.adapters:
            if adapter:
                raise InvalidInput("adapter", f"is {adapter!r}, and this engine has no slots for adapters")
            yield Using(self.cache_salt, self.serials, len(self.serials) - 1)
            return
        async with self.adapters.use(adapter) as held:
            given = {} if held.request is None else {"lora_request": held.request}
            yield Using(held.salt, [held.serial], 0 if adapter in (POLICY, BEFORE) else 1, given)

    async def after_load(self) -> None:
        """Wait for a running load, so that a request afterwards belongs to the new weights.

        A load of adapters is not waited for: it disturbs no request, and may itself wait for one.
        """
        if not self.options.adapters:
            async with self._loading:
                pass

    @contextlib.asynccontextmanager
    async def no_load(self) -> AsyncIterator[None]:
        """Exclude loads while the body runs."""
        async with self._loading:
            yield

    @property
    def serial(self) -> int:
        """Serial of the newest load; 0 for the initial model."""
        return self.serials[-1]

    @property
    def cache_salt(self) -> str:
        """Salt of new requests, so that they reuse no key-value block of other weights."""
        return f"load{self.serial}"

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
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def logprobs(
        self, token_ids: Sequence[int], images: Sequence[bytes] = (), adapter: str = POLICY
    ) -> np.ndarray:
        """float32 [L - 1]: log-probability of each token after the first; see `teach`."""
        return (await self.teach(token_ids, 1, 0, images, adapter)).logprobs

    async def teach(
        self,
        token_ids: Sequence[int],
        prompt_length: int,
        top: int,
        images: Sequence[bytes] = (),
        adapter: str = POLICY,
    ) -> Taught:
        """Log-probabilities of the tokens after the prompt, at temperature 1, by the newest weights.

        top: number of the likeliest tokens in each place; at most `options.top`. images: files of all images in the
        tokens, in order. adapter: as in `generate`. Runs before all queued requests and reads no cached block. Not
        allowed during a load or on a paused engine. Raises EngineFailed.
        """
        from vllm import SamplingParams as VllmSampling

        sampling = VllmSampling(max_tokens=1, prompt_logprobs=top, detokenize=False)
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                shown = placed(token_ids, images, self._rules(images)) if images else ()
                async with self.using(adapter) as weights:
                    prompt = await self.vllm_prompt(list(token_ids), shown, weights.salt)
                    name = uuid.uuid4().hex
                    stream = self.llm.generate(
                        prompt, sampling, request_id=name, priority=_BEFORE_ALL_OTHERS, **weights.arguments
                    )
                    outputs = [output async for output in stream]
        except TimeoutError:
            raise EngineFailed(f"vLLM gave no log-probabilities of a probe within {_PROBE_SECONDS:g} s") from None
        except Exception as error:  # vLLM's own errors share no base class
            raise EngineFailed(f"vLLM failed: {type(error).__name__}: {error}") from error
        found = next(output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None)
        places = [{token: one.logprob for token, one in place.items()} for place in found[prompt_length:]]
        return Taught.of(token_ids[prompt_length:], places, top)

    async def load(self, serial: int, update_info: dict[str, Any]) -> float:
        """Load weights (worker.UpdateInfo, or loader.fetch_adapters) while requests run. Returns the pause in seconds.

        If the load fails or takes too long, the engine stays paused with part of the weights new. Only another `load`
        of a full version repairs it. An engine that holds adapters keeps the one before.
        """
        async with self._loading:
            if self.options.adapters:
                return await self._swap(serial, update_info)
            begin = time.monotonic()
            try:
                await _within(_CALL_SECONDS, "pausing", self._pause())
                paused = time.monotonic()
                update = self.llm.collective_rpc("load_version", args=(update_info,))
                await _within(_LOAD_SECONDS, "the update", update)
                self.serials.append(serial)
                loaded = time.monotonic()
                await _within(_CALL_SECONDS, "resuming", self.llm.resume_generation())
            except Exception as error:
                with contextlib.suppress(Exception):  # the core may be gone
                    abandoning = self.llm.collective_rpc("abandon_weight_update")
                    await _within(_CALL_SECONDS, "abandoning the update", abandoning)
                raise EngineFailed(f"loading failed, the engine is paused: {error}") from error
            end = time.monotonic()
            self.last_load = LoadSeconds(paused - begin, loaded - paused, end - loaded)
            log.debug("explorer.engine.loaded", serial=serial, **asdict(self.last_load))
            return end - begin

    async def _swap(self, serial: int, update_info: dict[str, Any]) -> float:
        """Make an adapter the policy's, or the base model if there are no files."""
        lora, files = update_info["lora"], [Path(file) for file in update_info["files"]]
        with tempfile.TemporaryDirectory(prefix="trinity-adapter-") as made:
            folder = Path(made) if files else None
            if folder is not None:
                await asyncio.to_thread(lay_out, folder, lora, files)
            try:
                swap = self.adapters.load(POLICY, folder, serial, BEFORE if self.options.keeps_before else "")
                seconds = await _within(_LOAD_SECONDS, "the swap", swap)
            except (InvalidInput, Full) as error:
                raise EngineFailed(f"loading an adapter failed: {error}") from error
        self.serials.append(serial)
        log.debug("explorer.engine.swapped", serial=serial, seconds=seconds, held=self.adapters.held)
        return seconds

    async def _pause(self) -> None:
        """Pause after the running steps. `AsyncLLM.pause_generation` would sleep 20 ms more, to let outputs arrive."""
        await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def enter_group(self, init_info: dict[str, Any]) -> None:
        """Make the workers enter a collective group (worker.InitInfo). Raises EngineFailed."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        try:
            request = WeightTransferInitRequest(init_info=init_info)
            await _within(_CALL_SECONDS, "vLLM's answer", self.llm.init_weight_transfer_engine(request))
        except Exception as error:
            raise EngineFailed(f"entering a collective group failed: {error}") from error

    async def check(self) -> None:
        """Raises EngineFailed if vLLM's core is gone."""
        try:
            await self.llm.check_health()
        except Exception as error:
            raise EngineFailed(f"vLLM is not healthy: {error}") from error

    def close(self) -> None:
        self.llm.shutdown()
        # AsyncLLM shuts down again when it is deleted, which prints a traceback while Python ends.
        self.llm.shutdown = lambda timeout=None: None


async def start_engines(options: EngineOptions, devices: Sequence[str | None]) -> list[Engine]:
    """start.start_vllm in a thread. If this is cancelled, the engines' processes are ended, and so is the thread."""
    starting = asyncio.ensure_future(asyncio.to_thread(start_vllm, options, devices))
    try:
        engines = [Engine(llm, options) for llm in await asyncio.shield(starting)]
    except asyncio.CancelledError:
        while not starting.done():  # it may begin the next engine
            for core in active_children():
                core.kill()
            await asyncio.wait([starting], timeout=_KILL_SECONDS)
        starting.exception()  # of the kill: asyncio would log it as an error
        raise
    for engine in engines:
        engine.llm.output_processor.update_scheduler_stats = engine.note_usage
    return engines


async def _within(seconds: float, what: str, call: Awaitable[Any]) -> Any:
    """Raises EngineFailed after the limit."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await call
    except TimeoutError:
        if not limit.expired():
            raise
        raise EngineFailed(f"{what} took longer than {seconds:g} s") from None


def completion_of(part: Any, serials: Sequence[int]) -> Completion:
    """A complete response. `serials` has the serial of the weights after 0, 1, 2 ... loads.

    The field of a token's rank has the number of loads before it (scheduler.DeferredOutputs). An engine whose weights
    never change has one serial, and true ranks.
    """
    token_ids = np.asarray(part.token_ids, dtype=np.int32)
    found = part.logprobs
    logprobs = np.asarray(found.logprobs if found is not None else (), dtype=np.float32)
    if len(logprobs) != len(token_ids):
        raise EngineFailed(f"vLLM gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
    loads = np.asarray(found.ranks if found is not None and len(serials) > 1 else np.zeros(len(token_ids)), np.int64)
    ends = [*(np.flatnonzero(np.diff(loads)) + 1).tolist(), len(loads)]
    spans = spans_of([(VersionSpan(serials[loads[end - 1]], 0, end), end) for end in ends if end])
    return Completion(token_ids, logprobs, spans, part.finish_reason or "stop", getattr(part, "routed_experts", None))
