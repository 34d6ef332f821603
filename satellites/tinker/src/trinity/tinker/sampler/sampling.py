"""Samples by one version, with vLLM's parameters, and returns log-probabilities as the `tinker` client has them."""

import asyncio
import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trinity.explorer.engine.engine import Using
from trinity.explorer.engine.versions import Versions
from trinity.explorer.types import EngineFailed, is_refusal
from trinity.runtime.errors import InvalidInput
from trinity.tinker.commands.samples import NO_LOGPROB, Sample, Sampled, Samples, Top
from trinity.tinker.sampler.seconds import Seconds
from trinity.tinker.sampler.turns import Turns

_Entries = Sequence[Mapping[int, Any] | None]  # of each position: vLLM's Logprob by token


async def sample(versions: Versions, seconds: Seconds, turns: Turns, request: Sample) -> Samples:
    """Samples `sampling.n` sequences. Raises InvalidInput for what vLLM refuses, EngineFailed, and the errors of
    Versions.using."""
    copies = request.sampling.n if request.sampling.temperature == 0 else 1  # they are all equal
    count = request.sampling.n // copies
    async with versions.using(request.version) as weights:
        prompt = len(request.prompt_token_ids)
        most = prompt + count * request.sampling.max_tokens
        with seconds.of(request.tenant, count), turns.of(request.tenant, most) as turn:
            outputs, *of_prompt = await _outputs(versions, weights, request, count, turn.priority)
            turn.took = prompt + sum(len(part.token_ids) for output in outputs for part in output.outputs)
    parts = sorted((part for output in outputs for part in output.outputs), key=lambda part: part.index)
    sequences = tuple(_sampled(part, request.topk_sample_logprobs) for part in parts) * copies
    versions.engine.tokens_generated += sum(len(one.tokens) for one in sequences[: len(parts)])
    cached = max(output.num_cached_tokens or 0 for output in outputs)
    if not _wants_prompt(request):
        return Samples(sequences, cached=cached)
    computed = of_prompt[0] if of_prompt else outputs
    found = next(output.prompt_logprobs for output in computed if output.prompt_logprobs is not None)
    return Samples(sequences, *_of_prompt(request, found), cached)


async def _outputs(versions: Versions, weights: Using, request: Sample, count: int, priority: int) -> list[list[Any]]:
    """Returns vLLM's outputs of `count` sequences; and of the prompt, if it is computed separately."""
    prompt, wanted = list(request.prompt_token_ids), _wants_prompt(request)
    with _refusing():
        wished = [_parameters(request, count, wanted and count == 1)]
        if wanted and count > 1:  # else vLLM computes them for each sequence
            wished.append(_parameters(request, 1, True, max_tokens=1))
    return await asyncio.gather(*(_run(versions, weights, prompt, one, priority) for one in wished))


def _wants_prompt(request: Sample) -> bool:
    return request.prompt_logprobs or request.topk_prompt_logprobs > 0


def _parameters(request: Sample, count: int, prompt: bool, max_tokens: int | None = None) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        n=count,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k if sampling.top_k > 0 else -1,
        max_tokens=max_tokens or sampling.max_tokens,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(request.stop_token_ids) or None,
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        logprobs=request.topk_sample_logprobs,
        flat_logprobs=not request.topk_sample_logprobs,  # arrays, if each token has one value
        prompt_logprobs=request.topk_prompt_logprobs if prompt else None,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


async def _run(versions: Versions, weights: Using, prompt: list[int], parameters: Any, priority: int) -> list[Any]:
    from vllm import TokensPrompt

    with _refusing():
        given = TokensPrompt(prompt_token_ids=prompt, cache_salt=weights.salt)
        how = {"request_id": uuid.uuid4().hex, "priority": priority, **weights.arguments}
        stream = versions.engine.llm.generate(given, parameters, **how)
        return [output async for output in stream]


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turns vLLM's refusals into InvalidInput, and its failures into EngineFailed."""
    try:
        yield
    except Exception as error:
        if is_refusal(error):
            raise InvalidInput("sampling_params", str(error)) from error
        raise EngineFailed(f"vLLM failed: {type(error).__name__}: {error}") from error


def _sampled(part: Any, top: int) -> Sampled:
    if part.finish_reason not in ("stop", "length"):
        raise EngineFailed(f"vLLM ended a sequence by {part.finish_reason}")
    tokens = np.asarray(part.token_ids, np.int32)
    if top:
        entries: Sequence[Mapping[int, Any]] = part.logprobs
        values = [one[token].logprob for one, token in zip(entries, part.token_ids, strict=True)]
    else:
        values = part.logprobs.logprobs
    logprobs = np.asarray(values, np.float32)
    return Sampled(tokens, logprobs, part.finish_reason == "stop", _top(entries, top) if top else None)


def _of_prompt(request: Sample, entries: _Entries) -> tuple[np.ndarray | None, Top | None]:
    """Returns the prompt's log-probabilities, float32 [P], and its most likely tokens, each None unless requested."""
    tokens = request.prompt_token_ids
    first = max(1, len(tokens) - request.prompt_logprobs_last_n) if request.prompt_logprobs_last_n else 1
    kept = [None if index < first else entry for index, entry in enumerate(entries)]
    pairs = zip(kept, tokens, strict=True)
    logprobs = np.array([np.nan if entry is None else entry[token].logprob for entry, token in pairs], np.float32)
    k = request.topk_prompt_logprobs
    return logprobs if request.prompt_logprobs else None, _top(kept, k) if k else None


def _top(entries: _Entries, k: int) -> Top:
    """Returns the `k` most likely tokens of each position. vLLM gives the position's own token as well."""
    ids, logprobs = np.zeros((len(entries), k), np.int32), np.full((len(entries), k), NO_LOGPROB, np.float32)
    for row, entry in enumerate(entries):
        found = ((one.logprob, token) for token, one in (entry or {}).items() if np.isfinite(one.logprob))
        for column, (logprob, token) in enumerate(sorted(found, reverse=True)[:k]):
            ids[row, column], logprobs[row, column] = token, logprob
    return Top(ids, logprobs)
