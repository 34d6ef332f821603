"""The trainer's model and a real vLLM engine give the same log-probabilities of tokens after images, and a canary with
a picture tells an engine with another vision tower from a sound one.
"""

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from support.data.vision import make_model, picture
from trinity.config.schema.model import ModelConfig
from trinity.data import images
from trinity.data.experience import SamplingParams
from trinity.explorer.engine.engine import Engine
from trinity.explorer.types import EngineOptions
from trinity.trainer.data.batch import TrainSequence
from trinity.trainer.data.images import ImageReader
from trinity.trainer.data.microbatch import after_first_token, collate
from trinity.trainer.model.policy import load_policy
from trinity.trainer.weights.canary import make_canary, picture_probe, pseudo_random_probe
from trinity.weights.canary import measure

pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        importlib.util.find_spec("torchvision") is None, reason="vLLM's Qwen2.5-VL needs torchvision: '.[vision]'"
    ),
]

SHOWN = [(), (picture(colour="red"),), (picture(64, 24, colour="white"), picture(9, 40, colour="blue"))]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def reader(folder: Path) -> ImageReader:
    found = ImageReader.of(ModelConfig(model_path=str(folder)))
    assert found is not None
    return found


async def engine_of(folder: Path, reader: ImageReader) -> Engine:
    return await asyncio.wait_for(Engine.start(EngineOptions(str(folder), "cpu", 256, images=reader.rules)), 180)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path, reader: ImageReader) -> AsyncIterator[Engine]:
    made = await engine_of(folder, reader)
    yield made
    made.close()


async def test_sampled_tokens_have_the_same_log_probabilities(
    engine: Engine, folder: Path, reader: ImageReader
) -> None:
    sampling = SamplingParams(max_tokens=24, n=3, ignore_eos=True)
    sequences, sampled = [], []
    for shown in SHOWN:
        prompt = images.expanded([1, *[2, reader.rules.token, 3] * len(shown), 8], shown, reader.rules)
        for completion in await asyncio.wait_for(engine.generate(prompt, sampling, shown), 120):
            tokens, count = np.array([*prompt, *completion.token_ids], np.int32), len(completion.token_ids)
            sequences.append(
                TrainSequence(tokens, len(prompt), completion.logprobs, np.ones(count, bool), 0, images=shown)
            )
            sampled.append(completion.logprobs)
    assert len(sampled) == 9
    for packed in (True, False):
        policy = load_policy(ModelConfig(model_path=str(folder)), torch.float32, 64, packed=packed)
        assert policy.packed == packed
        with torch.no_grad():
            found, _ = policy(collate(sequences, 0, packed, reader))
        np.testing.assert_allclose(found.numpy(), np.stack(sampled), atol=TOLERANCE)


async def test_a_canary_sees_a_vision_tower_that_is_another(
    engine: Engine, folder: Path, reader: ImageReader, tmp_path: Path
) -> None:
    policy = load_policy(ModelConfig(model_path=str(folder)), torch.float32, 64, packed=True)
    vocabulary = int(policy.model.config.get_text_config().vocab_size)
    seen, shown = picture_probe(vocabulary, reader.rules)
    text = pseudo_random_probe(vocabulary)
    asked = [after_first_token(seen, (shown,)), *map(after_first_token, text)]
    with torch.no_grad():
        found, _ = policy(collate(asked, 0, True, reader))
    rows = [row[: len(tokens) - 1] for row, tokens in zip(found.tolist(), (seen, *text), strict=True)]
    canary = make_canary((seen, *text), rows, (TOLERANCE / 10, TOLERANCE), 1, [(shown,)])
    without = make_canary(text, rows[1:], (TOLERANCE / 10, TOLERANCE), 1)
    assert (await asyncio.wait_for(measure([engine], canary, 255), 120)).within(canary)
    other = make_model(tmp_path / "model")
    weights = load_file(other / "model.safetensors")
    for name, tensor in weights.items():
        if "visual" in name and name.endswith("weight") and tensor.ndim > 1:
            tensor.mul_(1.5)
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    damaged = await engine_of(other, reader)
    try:
        assert (await asyncio.wait_for(measure([damaged], without, 255), 120)).within(without)
        assert not (await asyncio.wait_for(measure([damaged], canary, 255), 120)).within(canary)
    finally:
        damaged.close()
