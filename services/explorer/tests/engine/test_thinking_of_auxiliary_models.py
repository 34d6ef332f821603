"""An auxiliary model's own enable_thinking is set in its own chat template, whether it writes or rates."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from trinity.config.schema.explorer import AuxiliaryModelConfig
from trinity.data.experience import SamplingParams
from trinity.explorer.engine import auxiliary
from trinity.explorer.engine.auxiliary import AuxiliaryModels
from trinity.explorer.types import EngineOptions

pytestmark = pytest.mark.core

SAID = "{{ '?' if enable_thinking is not defined else '+' if enable_thinking else '-' }}"


class Engine:
    """Takes down what it is asked instead of sampling or rating. Stands for a pool, too."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    async def generate(self, prompt: list[int], sampling: SamplingParams) -> list[Any]:
        self.asked.append(prompt)
        return []

    async def encode(self, prompt: Any, *_: Any) -> AsyncIterator[Any]:
        self.asked.append(prompt["prompt_token_ids"])
        yield SimpleNamespace(outputs=SimpleNamespace(data=np.zeros(1)))

    def close(self) -> None: ...


@pytest.mark.parametrize(("value", "begins"), [(None, "?"), (True, "+"), (False, "-")])
@pytest.mark.parametrize("kind", ["generate", "score"])
async def test_enable_thinking_reaches_the_template_of_an_auxiliary_model(
    quickstart_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, value: bool | None, begins: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quickstart_model)
    tokenizer.chat_template = SAID + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path)
    engine = Engine()

    async def start(*_: Any) -> Engine:
        return engine

    monkeypatch.setattr(auxiliary.EnginePool, "start", start)
    monkeypatch.setattr(auxiliary, "start_vllm", lambda *_: [engine])
    config = AuxiliaryModelConfig(model_path=str(tmp_path), name="one", kind=kind, enable_thinking=value)
    options = EngineOptions(model="policy", device="cpu", max_model_len=64)
    models = await AuxiliaryModels.start([config], options, [])
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    if kind == "generate":
        await models.judge().chat(talk[:1], SamplingParams(max_tokens=1, n=1))
    else:
        await models.reward_model().rate([talk])
    (prompt,) = engine.asked
    assert tokenizer.decode(prompt).startswith(begins + "<|user|>1+1")
