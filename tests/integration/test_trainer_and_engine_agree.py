"""A trainer and a real vLLM engine compute the same: of what was sampled, and by adapters.

Adapters are merged with the base at every load, by files and by a collective group.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from support.servers.shared_engine import ENGINE_TESTS
from trinity.config.schema.model import LoraConfig, ModelConfig
from trinity.data.experience import SamplingParams
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.weights.loader import base_of, fetch
from trinity.runtime.errors import InvalidInput
from trinity.trainer.data.batch import TrainSequence
from trinity.trainer.data.microbatch import collate
from trinity.trainer.model.lora import write_adapters
from trinity.trainer.model.policy import load_policy
from trinity.trainer.weights.shards import describe, write_shards
from trinity.weights.collective import Group, Store, send
from trinity.weights.manifest import Canary, Manifest, Probe
from trinity.weights.stores import FolderStore
from trinity.weights.stores.cache import WeightCache

pytestmark = [pytest.mark.extended, *ENGINE_TESTS]

PROMPTS = [[10, 20, 30, 40], [50, 60], list(range(3, 60))]
TEMPERATURE = 0.7
PROBES = [[(11 * i + k) % 250 for i in range(24)] for k in range(3)]
TOLERANCE = 1e-4
RUN = "run"


@dataclass(frozen=True)
class Version:
    """As a trainer publishes it, and what peft says that it computes."""

    manifest: Manifest
    canary: Canary
    adapters: dict[str, torch.Tensor]


def canary_of(policy: Any) -> Canary:
    probes = []
    for tokens in PROBES:
        ids = torch.tensor(tokens)[None]
        with torch.no_grad():
            logs = torch.log_softmax(policy(input_ids=ids).logits[0, :-1].float(), -1)
        probes.append(Probe(tuple(tokens), tuple(logs.gather(1, ids[0, 1:, None])[:, 0].tolist())))
    return Canary(tuple(probes), TOLERANCE, 10 * TOLERANCE)


@pytest.fixture(scope="module")
def versions(quickstart_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Version]:
    """Version 0, the base model, and two of different adapters."""
    root, store = tmp_path_factory.mktemp("adapters"), FolderStore(tmp_path_factory.mktemp("store"), RUN)
    plain = AutoModelForCausalLM.from_pretrained(quickstart_model, dtype=torch.float32)
    base = Manifest(RUN, 0, 0, (), (), (), 1.0, str(quickstart_model))
    found = [Version(base, canary_of(plain), {})]
    config = ModelConfig(model_path=str(quickstart_model), lora_configs=[LoraConfig(lora_rank=4, lora_alpha=8)])
    for number in (1, 2):
        policy = load_policy(config, torch.float32, 64)
        torch.manual_seed(number)
        for _, parameter in policy.weights():
            parameter.data.normal_(std=0.05)
        assert policy.lora is not None
        folder = root / f"v{number}"
        write_adapters(folder / "peft", policy.lora, str(quickstart_model), policy.weights())
        adapters = {name: parameter.detach().clone() for name, parameter in policy.weights()}
        layout = [describe(name, tensor.dtype, tensor.shape) for name, tensor in adapters.items()]
        tensors, infos = write_shards(adapters.items(), layout, folder, "part-{:05d}.safetensors")
        manifest = Manifest(RUN, number, number, tuple(tensors), tuple(infos), (), 1.0, lora=policy.lora)
        manifest = Manifest(**{**vars(manifest), "offers": (store.put(manifest, folder, False),)})
        store.seal(manifest)
        again = AutoModelForCausalLM.from_pretrained(quickstart_model, dtype=torch.float32)
        found.append(Version(manifest, canary_of(PeftModel.from_pretrained(again, folder / "peft")), adapters))
    return found


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path, RUN, ["folder"], "")


async def served(pool: EnginePool, versions: list[Version]) -> list[int]:
    """The versions whose canary the engine computes."""
    return [v.manifest.version for v in versions if (await pool.measure(v.canary)).within(v.canary)]


async def test_logprobs_of_sampled_tokens_are_the_same_in_trainer_and_engine(
    pool: EnginePool, quickstart_model: Path
) -> None:
    sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=40, n=3, ignore_eos=True)
    sampled = await asyncio.wait_for(asyncio.gather(*(pool.generate(prompt, sampling) for prompt in PROMPTS)), 120)
    sequences, expected = [], []
    for prompt, completions in zip(PROMPTS, sampled, strict=True):
        for completion in completions:
            tokens = np.asarray([*prompt, *completion.token_ids], np.int32)
            mask = np.ones(len(completion.token_ids), bool)
            sequences.append(TrainSequence(tokens, len(prompt), completion.logprobs, mask, 0, temperature=TEMPERATURE))
            expected.append(completion.logprobs)
    assert len(expected) == 9
    config = ModelConfig(model_path=str(quickstart_model))
    for packed in (True, False):
        policy = load_policy(config, torch.float32, 64, packed=packed)
        assert policy.packed == packed
        with torch.no_grad():
            logprobs, _ = policy(collate(sequences, 0, packed))
        for row, values in zip(logprobs.numpy(), expected, strict=True):
            np.testing.assert_allclose(row[: len(values)], values, atol=1e-4)


async def test_every_version_is_the_base_and_its_own_adapters_forward_and_back(
    pool: EnginePool, versions: list[Version], cache: WeightCache, quickstart_model: Path
) -> None:
    assert await served(pool, versions) == [0]
    for number in (1, 2, 1, 0, 2):
        update_info, _ = await asyncio.to_thread(fetch, cache, versions[number].manifest, str(quickstart_model))
        await pool.load(number, update_info)
        assert await served(pool, versions) == [number]


async def test_a_group_sends_the_adapters_and_each_engine_merges_them(
    pool: EnginePool, versions: list[Version], quickstart_model: Path
) -> None:
    store = Store.serve("127.0.0.1")
    group = {
        "epoch": 1,
        "backend": "gloo",
        "store_address": store.address,
        "store_secret": store.secret,
        "world_size": 2,
        "timeout_seconds": 30.0,
    }
    await pool.enter_group(group, 1)
    trainer = await asyncio.to_thread(Group, store, 1, "gloo", 0, 2, torch.device("cpu"), 30.0)
    for number in (1, 2):
        manifest = versions[number].manifest
        tensors = [[t.name, t.dtype, list(t.shape), t.size_bytes] for t in manifest.tensors]
        update_info = {"epoch": 1, "bucket_bytes": 4096, "tensors": tensors}
        update_info |= base_of(manifest.lora, str(quickstart_model))
        await asyncio.gather(
            pool.load(number, update_info),
            asyncio.to_thread(send, trainer, manifest.tensors, iter(versions[number].adapters.items()), 4096),
        )
        assert await served(pool, versions) == [number]
    trainer.close()


async def test_another_base_model_is_refused_before_the_engines_pause(
    versions: list[Version], cache: WeightCache, quickstart_model: Path, tmp_path: Path
) -> None:
    other = AutoModelForCausalLM.from_pretrained(quickstart_model, dtype=torch.float32)
    other.config.hidden_size *= 2
    type(other)(other.config).save_pretrained(tmp_path / "other")
    with pytest.raises(InvalidInput, match=r"model\.model_path: .* in the base model's files"):
        fetch(cache, versions[1].manifest, str(tmp_path / "other"))


async def test_a_version_is_as_large_as_its_adapters(versions: list[Version], quickstart_model: Path) -> None:
    whole = (quickstart_model / "model.safetensors").stat().st_size
    adapters = sum(tensor.nbytes for tensor in versions[1].adapters.values())
    assert versions[1].manifest.size_bytes < adapters + 16_384 < whole / 5
