"""vLLM's own server answers a judge's questions, and gives a teacher's log-probabilities as an engine of ours does."""

import asyncio
import socket
from pathlib import Path

import numpy as np
import pytest

from support.servers.shared_engine import ENGINE_TESTS
from trinity.config.schema.explorer import AuxiliaryModelConfig
from trinity.config.schema.model import ModelConfig
from trinity.data.experience import SamplingParams
from trinity.explorer.chat import ChatTokenizer
from trinity.explorer.engine.auxiliary import AuxiliaryModels, Judge
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.serving import endpoint
from trinity.explorer.types import EngineOptions
from trinity.runtime.errors import InvalidInput

pytestmark = [pytest.mark.extended, *ENGINE_TESTS]

ASK = [{"role": "user", "content": "1+1"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, n=2)


async def test_it_answers_as_an_engine_of_the_run_does(pool: EnginePool, quickstart_model: Path) -> None:
    tokenizer = ChatTokenizer(ModelConfig(model_path=str(quickstart_model)))
    options = ["--model", str(quickstart_model), "--served-model-name", "owner/teacher"]
    app = await endpoint.application(endpoint.PooledClient(pool), options, tokenizer.template)
    listening = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(endpoint.run(app, [listening]))
    try:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        config = AuxiliaryModelConfig.model_validate(
            {"model_path": "owner/teacher", "external_model": {"base_url": url, "timeout_seconds": 60}}
        )
        options_of_policy = EngineOptions(model=str(quickstart_model), device="cpu", max_model_len=256)
        elsewhere = (await AuxiliaryModels.start([config], options_of_policy, [], {"teacher"})).judge()
        ours = Judge(pool, tokenizer)
        one, other = await elsewhere.chat(ASK, GREEDY)
        assert one == other, "greedy replies are asked for once, as vLLM demands"
        assert len(await elsewhere.chat(ASK, SamplingParams(n=3, max_tokens=4))) == 3
        tokens = [*tokenizer.prompt(ASK), *tokenizer.tokens("2 is the answer")]
        found, own = await elsewhere.teach(tokens, 5, 4), await ours.teach(tokens, 5, 4)
        assert len(found.logprobs) == len(tokens) - 5
        np.testing.assert_allclose(found.logprobs, own.logprobs, atol=1e-4)
        assert found.top is not None and own.top is not None and found.top.ids.shape == (len(tokens) - 5, 4)
        assert found.top.ids.tolist() == own.top.ids.tolist()
        np.testing.assert_allclose(found.top.logprobs, own.top.logprobs, atol=1e-4)
        with pytest.raises(InvalidInput, match=r"external_model: http\S+ answers 400: .*3000"):
            await elsewhere.teach([1] * 3000, 5)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listening.close()
