"""engine_args reach vLLM: n-gram speculation samples several tokens a step, with the trainer's log-probabilities."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from trinity.data.experience import SamplingParams
from trinity.explorer.engine.engine import Engine
from trinity.explorer.engine.scheduler import WholeLogprobs
from trinity.explorer.engine.start import config_of
from trinity.explorer.types import Completion, EngineOptions
from trinity.runtime.errors import InvalidInput

pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
]

_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
_PROMPT = [5, 6, 7, 8] * 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(quickstart_model: Path) -> AsyncIterator[Engine]:
    options = EngineOptions(
        str(quickstart_model), "cpu", 512, max_num_seqs=2, turn_end=7, engine_args={"speculative_config": _NGRAM}
    )
    engine = await Engine.start(options)
    yield engine
    engine.close()


async def sample(engine: Engine, temperature: float, stop: tuple[str, ...] = ()) -> list[Completion]:
    sampling = SamplingParams(temperature=temperature, max_tokens=64, n=2, ignore_eos=True, stop=stop, seed=3)
    return await asyncio.wait_for(engine.generate(_PROMPT, sampling), 120)


async def test_sampling_stops_at_the_end_of_a_turn_unless_it_ignores_ends(engine: Engine) -> None:
    sampling = SamplingParams(temperature=2.0, max_tokens=400, n=8)
    for completion in await asyncio.wait_for(engine.generate(_PROMPT, sampling), 200):
        tokens = completion.token_ids.tolist()
        assert 7 not in tokens[:-1] and 256 not in tokens[:-1]
        assert (completion.finish_reason == "stop") == (tokens[-1] in (7, 256))
    endless = SamplingParams(temperature=2.0, max_tokens=400, n=8, ignore_eos=True)
    found = await asyncio.wait_for(engine.generate(_PROMPT, endless), 200)
    assert any(7 in completion.token_ids[:-1] for completion in found)


def expected(model: torch.nn.Module, token_ids: np.ndarray, temperature: float) -> np.ndarray:
    ids = torch.tensor([*_PROMPT, *token_ids.tolist()])[None]
    with torch.no_grad():
        logs = torch.log_softmax(model(ids).logits[0, len(_PROMPT) - 1 : -1] / temperature, -1)
    return logs.gather(1, ids[0, len(_PROMPT) :, None])[:, 0].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.1])
async def test_speculated_tokens_have_the_trainers_logprobs_before_and_after_a_load(
    temperature: float, engine: Engine, quickstart_model: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(quickstart_model, dtype=torch.float32)
    for serial in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter, dtype=torch.float32))
        tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        save_file(tensors, tmp_path / f"{serial}.safetensors")
        names: list[list[Any]] = [[name, 0] for name in tensors]
        await engine.load(serial, {"files": [str(tmp_path / f"{serial}.safetensors")], "tensors": names})
        for completion in await sample(engine, temperature):
            assert len(completion.token_ids) == 64
            assert [(s.version, s.start, s.end) for s in completion.version_spans] == [(serial, 0, 64)]
            np.testing.assert_allclose(
                completion.logprobs, expected(model, completion.token_ids, temperature), atol=1e-3
            )


async def test_drafts_are_accepted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without deferred responses (a stop string) each step's tokens come by themselves."""
    sizes: list[int] = []
    whole = WholeLogprobs._update_sample_logprobs

    def count(self: WholeLogprobs, logprobs_lists: Any) -> None:
        sizes.append(len(logprobs_lists.logprobs))
        whole(self, logprobs_lists)

    monkeypatch.setattr(WholeLogprobs, "_update_sample_logprobs", count)
    await sample(engine, 0.0, stop=("a text that does not come",))
    assert sum(sizes) == 64, "greedy responses are sampled once"
    assert max(sizes) > 1


async def test_an_argument_that_this_vllm_lacks_is_refused_before_the_start(quickstart_model: Path) -> None:
    options = EngineOptions(str(quickstart_model), "cpu", 512, engine_args={"no_such": 1})
    with pytest.raises(InvalidInput, match="no_such, which this vLLM does not know"):
        config_of(options)


@pytest.mark.parametrize(("top", "most"), [(0, 20), (16, 20), (64, 64)])
async def test_an_engine_gives_a_teachers_tokens_and_no_fewer_than_clients_may_ask_for(
    quickstart_model: Path, top: int, most: int
) -> None:
    assert config_of(EngineOptions(str(quickstart_model), "cpu", 512, top=top)).model_config.max_logprobs == most
