"""The engine on real vLLM: exact log-probabilities, new weights in flight, repair after a failed load."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from trinity.explorer.engine.engine import Engine, EngineFailed
from trinity.explorer.engine.types import Completion, EngineOptions
from trinity.runtime.errors import InvalidInput
from trinity.runtime.experience import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]

PROMPT = [10, 20, 30, 40]
LENGTH = 256


def make_model(folder: Path, source: Path, tied: bool) -> Path:
    """The quickstart's model, tied or not."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    if tied:
        model.config.tie_word_embeddings = True
        model = type(model)(model.config)
    model.save_pretrained(folder)
    return folder


def new_weights(model: Path, folder: Path, seed: int) -> tuple[list[str], list[tuple[str, int]]]:
    """Other weights for the same model: files and tensors as a manifest names them."""
    torch.manual_seed(seed)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    policy.save_pretrained(folder)
    tied = policy.config.tie_word_embeddings
    tensors = {n: t.detach().clone() for n, t in policy.state_dict().items() if not (tied and n == "lm_head.weight")}
    save_file(tensors, folder / "part.safetensors")
    return [str(folder / "part.safetensors")], [(name, 0) for name in tensors]


def logprobs_of(model: Path, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """What transformers says of the response's tokens."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([*PROMPT, *token_ids.tolist()])[None]
    with torch.no_grad():
        logs = torch.log_softmax(policy(ids).logits[0, len(PROMPT) - 1 : -1] / temperature, -1)
    return logs.gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def model(quickstart_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "untied", quickstart_model, tied=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[Engine]:
    started = await Engine.start(EngineOptions(model=str(model), device="cpu", max_model_len=LENGTH))
    yield started
    started.close()


async def sample(engine: Engine, tokens: int = 24, temperature: float = 1.0, n: int = 1) -> list[Completion]:
    sampling = SamplingParams(temperature=temperature, max_tokens=tokens, n=n, ignore_eos=True)
    return await asyncio.wait_for(engine.generate(PROMPT, sampling), 120)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_transformers(engine: Engine, model: Path, temperature: float) -> None:
    for completion in await sample(engine, temperature=temperature, n=3):
        expected = logprobs_of(model, completion.token_ids, temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert [(s.version, s.start, s.end) for s in completion.version_spans] == [(0, 0, 24)]


async def test_requests_that_do_not_fit_are_refused_by_name(engine: Engine) -> None:
    with pytest.raises(InvalidInput, match=r"sampling\.max_tokens"):
        await sample(engine, tokens=LENGTH)
    with pytest.raises(InvalidInput, match="prompt_token_ids"):
        await engine.generate([], SamplingParams())


async def test_a_response_carries_a_span_for_every_version_that_sampled_it(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    before = logprobs_of(model, (await sample(engine))[0].token_ids)  # warm, so that sampling is slower than a load
    assert len(before) == 24
    first = new_weights(model, tmp_path / "1", 1)
    second = new_weights(model, tmp_path / "2", 2)
    running = [asyncio.create_task(sample(engine, tokens=240)) for _ in range(8)]
    await asyncio.sleep(0.15)
    await engine.load(1, *first)
    await asyncio.sleep(0.15)
    pause = await engine.load(2, *second)
    completions = [(await task)[0] for task in running]
    assert pause < 5
    for completion in completions:
        spans = completion.version_spans
        assert [span.version for span in spans] == [0, 1, 2]
        assert spans[0].start == 0
        assert spans[-1].end == 240
        assert all(a.end == b.start for a, b in itertools.pairwise(spans))
        exact = slice(0, spans[0].end)
        expected = logprobs_of(model, completion.token_ids)[exact]
        np.testing.assert_allclose(completion.logprobs[exact], expected, atol=1e-4)
    (fresh,) = await sample(engine)
    np.testing.assert_allclose(fresh.logprobs, logprobs_of(tmp_path / "2", fresh.token_ids), atol=1e-4)
    assert [span.version for span in fresh.version_spans] == [2]


async def test_spans_of_a_vllm_that_does_not_name_its_weights(
    engine: Engine, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM before 0.32: outputs are followed as they are sampled, and spans begin where the pauses were."""
    monkeypatch.setattr(engine._spans, "native", False)
    before = engine.version
    weights = new_weights(model, tmp_path / "9", 9)
    running = [asyncio.create_task(sample(engine, tokens=240)) for _ in range(4)]
    await asyncio.sleep(0.3)
    await engine.load(9, *weights)
    for completion in [(await task)[0] for task in running]:
        assert [span.version for span in completion.version_spans] == [before, 9]
        assert (completion.version_spans[0].start, completion.version_spans[-1].end) == (0, 240)
        assert len(completion.logprobs) == 240
    (fresh,) = await sample(engine)
    np.testing.assert_allclose(fresh.logprobs, logprobs_of(tmp_path / "9", fresh.token_ids), atol=1e-4)


async def test_a_failed_load_leaves_the_engine_paused_until_a_full_load(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    files, tensors = new_weights(model, tmp_path / "3", 3)
    with pytest.raises(EngineFailed, match="version 3"):
        await engine.load(3, files, [*tensors, ("model.no_such_tensor", 0)])
    waiting = asyncio.create_task(sample(engine))
    await asyncio.sleep(1.0)
    assert not waiting.done(), "it went on with part of the weights new"
    await engine.load(3, files, tensors)
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


async def test_a_tied_model_computes_with_the_new_weights_too(quickstart_model: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "tied", quickstart_model, tied=True)
    engine = await Engine.start(EngineOptions(model=str(model), device="cpu", max_model_len=LENGTH))
    try:
        files, tensors = new_weights(model, tmp_path / "new", 4)
        assert "lm_head.weight" not in [name for name, _ in tensors]
        await engine.load(1, files, tensors)
        (completion,) = await sample(engine)
        np.testing.assert_allclose(completion.logprobs, logprobs_of(tmp_path / "new", completion.token_ids), atol=1e-4)
    finally:
        engine.close()
