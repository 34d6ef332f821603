"""The engine on real vLLM: exact log-probabilities, new weights in flight, repair after a failed load."""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from support.servers.shared_engine import ENGINE_TESTS, MAX_LENGTH, SEQUENCES
from trinity.data.experience import SamplingParams
from trinity.explorer.engine.engine import Engine
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.engine.scheduler import WholeLogprobs
from trinity.explorer.types import Completion, EngineFailed, EngineUsage
from trinity.runtime.errors import InvalidInput

pytestmark = [pytest.mark.core, *ENGINE_TESTS]

PROMPT = [10, 20, 30, 40]


def new_weights(model: Path, folder: Path, seed: int | None) -> dict[str, Any]:
    """Other weights for the same model, as the worker's UpdateInfo names them; without a seed its own."""
    torch.manual_seed(seed or 0)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_((0.05 if seed is not None else 0.0) * torch.randn_like(parameter))
    policy.save_pretrained(folder)
    tensors = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
    save_file(tensors, folder / "part.safetensors")
    return {"files": [str(folder / "part.safetensors")], "tensors": [[name, 0] for name in tensors]}


def logprobs_of(model: Path, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of the response's tokens by transformers."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([*PROMPT, *token_ids.tolist()])[None]
    with torch.no_grad():
        logs = torch.log_softmax(policy(ids).logits[0, len(PROMPT) - 1 : -1] / temperature, -1)
    return logs.gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()


async def sample(engine: Engine, tokens: int = 24, temperature: float = 1.0, n: int = 1) -> list[Completion]:
    sampling = SamplingParams(temperature=temperature, max_tokens=tokens, n=n, ignore_eos=True)
    return await asyncio.wait_for(engine.generate(PROMPT, sampling), 120)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_transformers(engine: Engine, quickstart_model: Path, temperature: float) -> None:
    for completion in await sample(engine, temperature=temperature, n=3):
        expected = logprobs_of(quickstart_model, completion.token_ids, temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert [(s.version, s.start, s.end) for s in completion.version_spans] == [(0, 0, 24)]


async def test_logprobs_come_once_for_a_whole_response(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    whole = WholeLogprobs._update_sample_logprobs

    def count(self: WholeLogprobs, logprobs_lists: Any) -> None:
        sizes.append(len(logprobs_lists.logprobs))
        whole(self, logprobs_lists)

    monkeypatch.setattr(WholeLogprobs, "_update_sample_logprobs", count)
    await sample(engine, n=3)
    assert sizes == [24, 24, 24]


async def test_a_response_that_a_stop_string_ends_has_all_its_logprobs(engine: Engine) -> None:
    """A stop string ends it in the frontend, not in the engine core, so no output is deferred there."""
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, seed=5)
    (whole,) = await asyncio.wait_for(engine.generate(PROMPT, sampling), 60)
    words = [engine.llm.get_tokenizer().decode([token]) for token in whole.token_ids]
    new = [n for n in range(1, 25) if words[n - 1].strip("\ufffd") and words[n - 1] not in "".join(words[: n - 1])]
    (cut,) = await asyncio.wait_for(engine.generate(PROMPT, replace(sampling, stop=(words[new[-1] - 1],))), 60)
    assert cut.token_ids.tolist() == whole.token_ids[: new[-1]].tolist()
    np.testing.assert_allclose(cut.logprobs, whole.logprobs[: new[-1]], atol=1e-5)


async def test_engines_without_requests_leave_the_cores_to_others(engine: Engine) -> None:
    """vLLM's processes poll for a second after each message, and a trainer beside them waits for the core."""
    await sample(engine)
    processes = psutil.Process().children(recursive=True)
    assert len(processes) >= 2
    before = processor_seconds(processes)
    await asyncio.sleep(0.8)
    assert processor_seconds(processes) - before < 0.4


def processor_seconds(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


async def test_requests_that_do_not_fit_are_refused_by_name(engine: Engine) -> None:
    with pytest.raises(InvalidInput, match=r"sampling\.max_tokens"):
        await sample(engine, tokens=MAX_LENGTH)
    with pytest.raises(InvalidInput, match="prompt_token_ids"):
        await engine.generate([], SamplingParams())


async def over_two_loads(engine: Engine, updates: list[dict[str, Any]], seconds: float) -> list[Completion]:
    """Responses that run while versions 1 and 2 are loaded, each that long after what was before."""
    running = [asyncio.create_task(sample(engine, tokens=240)) for _ in range(SEQUENCES)]
    for version, update in enumerate(updates, 1):
        await asyncio.sleep(seconds)
        assert await engine.load(version, update) < 5
    return [(await task)[0] for task in running]


def versions_of(completion: Completion) -> list[int]:
    return [span.version for span in completion.version_spans]


async def test_a_response_carries_a_span_for_every_version_that_sampled_it(
    engine: Engine, quickstart_model: Path, tmp_path: Path
) -> None:
    await sample(engine)  # warm, so that sampling is slower than a load
    original, *updates = (new_weights(quickstart_model, tmp_path / str(seed), seed) for seed in (None, 1, 2))
    for seconds in (0.15, 0.05, 0.3, 0.6, 1.2):  # how fast this machine samples just now is not known
        completions = await over_two_loads(engine, updates, seconds)
        if all(versions_of(completion) == [0, 1, 2] for completion in completions):
            break
        await engine.load(0, original)
    for completion in completions:
        spans = completion.version_spans
        assert versions_of(completion) == [0, 1, 2]
        assert spans[0].start == 0
        assert spans[-1].end == 240
        assert all(a.end == b.start for a, b in itertools.pairwise(spans))
        exact = slice(0, spans[0].end)
        expected = logprobs_of(quickstart_model, completion.token_ids)[exact]
        np.testing.assert_allclose(completion.logprobs[exact], expected, atol=1e-4)
    (fresh,) = await sample(engine)
    np.testing.assert_allclose(fresh.logprobs, logprobs_of(tmp_path / "2", fresh.token_ids), atol=1e-4)
    assert [span.version for span in fresh.version_spans] == [2]


async def test_a_failed_load_leaves_the_engine_paused_until_a_full_load(
    engine: Engine, quickstart_model: Path, tmp_path: Path
) -> None:
    weights = new_weights(quickstart_model, tmp_path / "3", 3)
    broken = {**weights, "tensors": [*weights["tensors"], ["model.no_such_tensor", 0]]}
    with pytest.raises(EngineFailed, match="paused"):
        await engine.load(10, broken)
    waiting = asyncio.create_task(sample(engine))
    await asyncio.sleep(1.0)
    assert not waiting.done(), "it went on with part of the weights new"
    await engine.load(11, weights)
    (completion,) = await waiting
    np.testing.assert_allclose(completion.logprobs, logprobs_of(tmp_path / "3", completion.token_ids), atol=1e-4)


async def test_a_cancelled_request_leaves_the_engine(engine: Engine) -> None:
    running = [asyncio.create_task(sample(engine, tokens=240)) for _ in range(4)]
    await asyncio.sleep(0.2)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    async with asyncio.timeout(10):
        while engine.llm.output_processor.has_unfinished_requests():
            await asyncio.sleep(0.05)
    await engine.check()


async def test_the_engine_says_what_it_has_to_do(engine: Engine) -> None:
    """About once a second, at a step; an engine that has reported just now says nothing of a short response."""
    engine.usage = EngineUsage()
    async with asyncio.timeout(60):
        while not engine.usage.running:
            await sample(engine, n=3)
    assert 1 <= engine.usage.running + engine.usage.waiting <= 3
    assert 0 < engine.usage.kv_cache_ratio <= 1


async def test_a_pool_without_requests_uses_nothing(pool: EnginePool) -> None:
    pool.engines[0].usage = EngineUsage(2, 1, 0.5)
    assert pool.usage() == [EngineUsage()]
    async with pool.engine_for((), 3):
        assert pool.usage() == [EngineUsage(2, 1, 0.5)]
