"""The trainer's model and a real vLLM engine give the same log-probabilities of tokens after images, with adapters too,
and a canary with a picture tells an engine with another vision tower from a sound one.
"""

import asyncio
import importlib.util
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from support.fakes.data.vision import KINDS, make_model, picture
from support.servers.shared_engine import update_info
from trinity.config.schema.model import LoraConfig, ModelConfig
from trinity.data import images
from trinity.data.experience import SamplingParams
from trinity.explorer.engine.engine import Engine
from trinity.explorer.engine.pool import measure
from trinity.explorer.types import EngineOptions
from trinity.explorer.weights.loader import base_of
from trinity.runtime.errors import InvalidInput
from trinity.trainer.data.batch import TrainSequence
from trinity.trainer.data.images import ImageReader
from trinity.trainer.data.microbatch import after_first_token, collate
from trinity.trainer.model.policy import load_policy
from trinity.trainer.weights.canary import make_canary, picture_probe, pseudo_random_probe

pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        importlib.util.find_spec("torchvision") is None, reason="vLLM's Qwen-VL needs torchvision: '.[vision]'"
    ),
]

SHOWN = [(), (picture(colour="red"),), (picture(64, 24, colour="white"), picture(9, 40, colour="blue"))]
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = make_model(tmp_path_factory.mktemp("vision") / "model", request.param)
    scale_tower(found, 5)  # so that what is seen counts beside the text
    return found


def scale_tower(folder: Path, by: float) -> None:
    """Multiply the matrices of a model's vision tower."""
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if "visual" in name and name.endswith("weight") and tensor.ndim > 1:
            tensor.mul_(by)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def reader(folder: Path) -> ImageReader:
    found = ImageReader.of(ModelConfig(model_path=str(folder), images=True))
    assert found is not None
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path, reader: ImageReader) -> AsyncIterator[Engine]:
    made = await asyncio.wait_for(Engine.start(EngineOptions(str(folder), "cpu", 512, images=reader.rules)), 180)
    yield made
    made.close()


async def test_sampled_tokens_have_the_same_log_probabilities(
    engine: Engine, folder: Path, reader: ImageReader
) -> None:
    sampling = SamplingParams(max_tokens=24, n=3, ignore_eos=True)
    sequences, sampled = [], []
    for shown in SHOWN:
        prompt = images.expanded([1, *[2, reader.rules.token, 3] * len(shown), 8], shown, reader.rules)
        placed = images.placed(prompt, shown, reader.rules)
        for completion in await asyncio.wait_for(engine.generate(prompt, sampling, placed), 120):
            tokens, count = np.array([*prompt, *completion.token_ids], np.int32), len(completion.token_ids)
            sequences.append(
                TrainSequence(tokens, len(prompt), completion.logprobs, np.ones(count, bool), 0, images=placed)
            )
            sampled.append(completion.logprobs)
    assert len(sampled) == 9
    for packed in (True, False):
        policy = load_policy(ModelConfig(model_path=str(folder), images=True), torch.float32, 64, packed=packed)
        assert policy.packed == packed
        with torch.no_grad():
            found, _ = policy(collate(sequences, 0, packed, reader))
        np.testing.assert_allclose(found.numpy(), np.stack(sampled), atol=TOLERANCE)


async def test_images_of_later_turns_stand_where_they_were_shown(
    engine: Engine, folder: Path, reader: ImageReader
) -> None:
    """Though the policy sampled tokens of the same id before them, as many as an image has, and right before one."""
    token, rules, shown = reader.rules.token, reader.rules, SHOWN[2]
    tokens, placed = [1], []
    for image, reply in zip((*shown, SHOWN[1][0]), ([token, 9], [7, *[token] * 16, 3], [5, 2, token]), strict=True):
        told = images.expanded([2, token, 3, 8], [image], rules)
        placed += [one.moved(len(tokens)) for one in images.placed(told, [image], rules)]
        tokens += [*told, *reply]
    sampling, sequences, sampled = SamplingParams(max_tokens=16, n=2, ignore_eos=True), [], []
    for completion in await asyncio.wait_for(engine.generate(tokens, sampling, placed), 120):
        whole, count = np.array([*tokens, *completion.token_ids], np.int32), len(completion.token_ids)
        sequences.append(
            TrainSequence(whole, len(tokens), completion.logprobs, np.ones(count, bool), 0, images=(*placed,))
        )
        sampled.append(completion.logprobs)
    for packed in (True, False):
        policy = load_policy(ModelConfig(model_path=str(folder), images=True), torch.float32, 64, packed=packed)
        with torch.no_grad():
            found, _ = policy(collate(sequences, 0, packed, reader))
            others, _ = policy(collate([replace(one, images=one.images[:2]) for one in sequences], 0, packed, reader))
        np.testing.assert_allclose(found.numpy(), np.stack(sampled), atol=TOLERANCE)
        assert np.abs(others.numpy() - np.stack(sampled)).max() > 10 * TOLERANCE


async def test_more_images_than_an_engine_takes_are_refused(engine: Engine, reader: ImageReader) -> None:
    small = picture(8, 8)
    tokens = [1, *[reader.rules.token, 3] * (images.MOST_IMAGES + 1)]
    placed = [images.PlacedImage(1 + 2 * index, small) for index in range(images.MOST_IMAGES + 1)]
    with pytest.raises(InvalidInput, match="At most 128 image"):
        await asyncio.wait_for(engine.generate(tokens[:], SamplingParams(max_tokens=1), placed), 60)


async def test_an_engine_with_adapters_computes_what_the_trainer_computes(
    engine: Engine, folder: Path, reader: ImageReader, tmp_path: Path
) -> None:
    """Of the language model and of the tower; they are merged where they are loaded."""
    lora = LoraConfig(lora_rank=4, lora_alpha=8, target_modules=r".*(visual\.merger.*|_proj)")
    config = ModelConfig(model_path=str(folder), images=True, lora_configs=[lora])
    policy = load_policy(config, torch.float32, 64, packed=True)
    assert policy.lora is not None
    assert {target.name.split(".")[1] for target in policy.lora.targets} == {"language_model", "visual"}
    torch.manual_seed(1)
    for _, parameter in policy.weights():
        parameter.data.normal_(std=0.1)
    adapters = {name: parameter.detach().clone() for name, parameter in policy.weights()}
    save_file(adapters, tmp_path / "model.safetensors")
    asked = [(images.expanded([1, *[2, reader.rules.token, 3] * len(shown), *range(8, 30)], shown, reader.rules), shown)
             for shown in SHOWN]  # fmt: skip

    async def measured() -> list[np.ndarray]:
        return [await asyncio.wait_for(engine.logprobs(tokens, shown), 120) for tokens, shown in asked]

    before = await measured()
    await engine.load(1, update_info(tmp_path) | base_of(policy.lora, str(folder)))
    with torch.no_grad():
        shown = [after_first_token(tokens, images.placed(tokens, of, reader.rules)) for tokens, of in asked]
        found, _ = policy(collate(shown, 0, True, reader))
    for row, values, old in zip(found.numpy(), await measured(), before, strict=True):
        np.testing.assert_allclose(row[: len(values)], values, atol=TOLERANCE)
        assert np.abs(values - old).max() > 100 * TOLERANCE
    await engine.load(2, update_info(folder))


async def test_a_canary_sees_a_vision_tower_that_is_another(
    engine: Engine, folder: Path, reader: ImageReader, tmp_path: Path
) -> None:
    policy = load_policy(ModelConfig(model_path=str(folder), images=True), torch.float32, 64, packed=True)
    vocabulary = int(policy.model.config.get_text_config().vocab_size)
    seen, shown = picture_probe(vocabulary, reader.rules)
    text = pseudo_random_probe(vocabulary)
    asked = [after_first_token(seen, images.placed(seen, (shown,), reader.rules)), *map(after_first_token, text)]
    with torch.no_grad():
        found, _ = policy(collate(asked, 0, True, reader))
    rows = [row[: len(tokens) - 1] for row, tokens in zip(found.tolist(), (seen, *text), strict=True)]
    canary = make_canary((seen, *text), rows, (TOLERANCE / 10, TOLERANCE), 1, [(shown,)])
    without = make_canary(text, rows[1:], (TOLERANCE / 10, TOLERANCE), 1)
    assert (await asyncio.wait_for(measure([engine.logprobs], canary, 255), 120)).within(canary)
    other = tmp_path / "model"
    shutil.copytree(folder, other)
    scale_tower(other, 1.5)
    try:
        await engine.load(3, update_info(other))
        assert (await asyncio.wait_for(measure([engine.logprobs], without, 255), 120)).within(without)
        assert not (await asyncio.wait_for(measure([engine.logprobs], canary, 255), 120)).within(canary)
    finally:
        await engine.load(4, update_info(folder))
    assert (await asyncio.wait_for(measure([engine.logprobs], canary, 255), 120)).within(canary)


async def test_a_model_with_delta_networks_sees_what_its_engine_sees(tmp_path: Path) -> None:
    """Qwen3.5, whose delta networks vLLM computes in bfloat16 on CPUs."""
    folder = make_model(tmp_path / "model", "qwen3_5")
    scale_tower(folder, 10)
    config = ModelConfig(model_path=str(folder), images=True)
    reader, policy = ImageReader.of(config), load_policy(config, torch.float32, 64, packed=True)
    assert reader is not None
    started = await asyncio.wait_for(Engine.start(EngineOptions(str(folder), "cpu", 512, images=reader.rules)), 300)
    try:
        for shown in SHOWN:
            tokens = images.expanded([1, *[2, reader.rules.token, 3] * len(shown), *range(8, 30)], shown, reader.rules)
            asked = after_first_token(tokens, images.placed(tokens, shown, reader.rules))
            values = (await asyncio.wait_for(started.logprobs(tokens, shown), 120))[-21:]
            with torch.no_grad():
                found, blind = (policy(collate([one], 0, True, reader))[0][0, -21:].numpy()
                                for one in (asked, replace(asked, images=())))  # fmt: skip
            assert np.abs(found - values).mean() < 0.01
            assert not shown or np.abs(blind - values).mean() > 0.05
    finally:
        started.close()
