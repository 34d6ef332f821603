"""Judges and reward models on real vLLM engines: by name, and right to the digit."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForSequenceClassification

from trinity.config.schema.explorer import AuxiliaryModelConfig
from trinity.data.experience import SamplingParams
from trinity.explorer.engine.auxiliary import AuxiliaryModels
from trinity.explorer.types import EngineOptions
from trinity.runtime.errors import InvalidInput

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(240)]

TALKS = [[{"role": "user", "content": "1+1"}, {"role": "assistant", "content": str(i)}] for i in range(3)]


def _reward_model(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Qwen2ForSequenceClassification:
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    config.num_labels = 1
    model = Qwen2ForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def test_a_reward_model_rates_and_a_judge_writes(quickstart_model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quickstart_model)
    model = _reward_model(tmp_path / "rater", tokenizer)

    async def ask() -> tuple[list[float], list[str], list[str]]:
        options = EngineOptions(model=str(quickstart_model), device="cpu", max_model_len=256)
        configs = [
            AuxiliaryModelConfig(model_path=str(tmp_path / "rater")),
            AuxiliaryModelConfig(model_path=str(quickstart_model), name="judge"),
        ]
        auxiliary = await AuxiliaryModels.start(configs, options, [])
        try:
            await auxiliary.check()
            rates = await auxiliary.reward_model("rater").rate(TALKS)
            greedy = SamplingParams(temperature=0.0, max_tokens=8, n=3)
            once = await auxiliary.judge().chat(TALKS[0][:1], greedy)
            again = await auxiliary.judge("judge").chat(TALKS[0][:1], greedy)
            with pytest.raises(InvalidInput, match=r"'judge' is no model that rates; there are: rater"):
                auxiliary.reward_model("judge")
            return rates, once, again
        finally:
            auxiliary.close()

    rates, once, again = asyncio.run(ask())
    with torch.no_grad():
        ids = [tokenizer.apply_chat_template(talk, tokenize=True, return_dict=False) for talk in TALKS]
        expected = [model(torch.tensor([tokens])).logits.item() for tokens in ids]
    assert rates == pytest.approx(expected, abs=1e-5)
    assert once == again
    assert len(set(once)) == 1, "greedy answers are sampled once and copied"
    assert len(once) == 3
