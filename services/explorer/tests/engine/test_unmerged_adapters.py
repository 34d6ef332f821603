"""An engine that holds adapters beside its base model, on real vLLM: each request is computed by one of them.

Each engine test's model is the base of peft; what it must compute is what peft computes of the merged model.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from trinity.config.schema.model import ModelConfig
from trinity.data.experience import SamplingParams
from trinity.explorer.chat import ChatTokenizer
from trinity.explorer.engine.engine import CACHED, Engine
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.serving import endpoint
from trinity.explorer.serving.bounds import Bounds
from trinity.explorer.types import Completion, EngineFailed, EngineOptions
from trinity.explorer.weights.loader import fetch_adapters
from trinity.runtime.errors import Full, InvalidInput
from trinity.runtime.process import free_port
from trinity.weights.lora import Lora, LoraTarget
from trinity.weights.manifest import Manifest, manifest_of_folder
from trinity.weights.stores.cache import WeightCache

pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
]

SLOTS, RANK, LENGTH = 3, 4, 2048
PROMPT = [(7 * i) % 250 for i in range(300)]  # longer than a block of the cache
TARGETS = {1: ["q_proj", "down_proj"], 2: "all-linear", 3: ["gate_proj", "o_proj", "v_proj"]}
RANKS = {1: 4, 2: 4, 3: 2}
PARSERS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


@dataclass
class Version:
    """Adapters of a trained version as peft and as a publisher write them."""

    folder: Path
    lora: Lora
    merged: Any

    def logprobs(self, completion: Completion, prompt: list[int]) -> np.ndarray:
        ids = torch.tensor([*prompt, *completion.token_ids.tolist()])[None]
        with torch.no_grad():
            logs = torch.log_softmax(self.merged(ids).logits[0, len(prompt) - 1 : -1], -1)
        return np.asarray(logs.gather(1, ids[0, len(prompt) :, None])[:, 0])


def make(model: Path, folder: Path, number: int, rank: int) -> Version:
    torch.manual_seed(number)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy = get_peft_model(base, LoraConfig(r=rank, lora_alpha=3 * rank, target_modules=TARGETS[number]))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)
    policy.save_pretrained(folder)
    adapted = [module for module in base.named_modules() if hasattr(module[1], "lora_A")]
    targets = tuple(LoraTarget(f"{name}.weight", tuple(module.base_layer.weight.shape)) for name, module in adapted)
    again = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    merged = PeftModel.from_pretrained(again, folder).merge_and_unload()
    return Version(folder, Lora(rank, 3.0 * rank, targets), merged)


def manifest(version: Version, folder: Path, number: int) -> Manifest:
    """As a publisher stores it: the same tensors in two files, without peft's configuration."""
    from dataclasses import replace

    from safetensors.torch import load_file, save_file

    tensors = sorted(load_file(version.folder / "adapter_model.safetensors").items())
    half, found = len(tensors) // 2, []
    folder.mkdir()
    for name, part in (("a", tensors[:half]), ("b", tensors[half:])):
        (folder / name).mkdir()
        save_file(dict(part), folder / name / "model.safetensors")
        made = manifest_of_folder("run", number, folder / name)
        (folder / name / "model.safetensors").rename(folder / f"{name}.safetensors")
        file = f"{name}.safetensors"
        found.append(
            (
                [replace(tensor, file=file) for tensor in made.tensors],
                replace(made.files[0], name=file),
                made.offers,
            )
        )
    made = Manifest(
        "run",
        number,
        number,
        tuple(tensor for tensors, _, _ in found for tensor in tensors),
        tuple(file for _, file, _ in found),
        (replace(found[0][2][0], path=str(folder)),),
        0.0,
        lora=version.lora,
    )
    made.check()
    return made


@pytest.fixture(scope="module")
def versions(quickstart_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Version]:
    folder = tmp_path_factory.mktemp("adapters")
    return {number: make(quickstart_model, folder / f"v{number}", number, RANKS[number]) for number in TARGETS}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(quickstart_model: Path) -> AsyncIterator[Engine]:
    options = EngineOptions(str(quickstart_model), "cpu", LENGTH, max_num_seqs=4, adapters=SLOTS, adapter_rank=RANK)
    engine = await Engine.start(options)
    yield engine
    engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started: Engine) -> AsyncIterator[Engine]:
    """With the base model alone."""
    yield started
    for name in filter(None, started.adapters.names):
        await started.adapters.drop(name)
    await started.adapters.load("", None)
    assert not await started.llm.list_loras()


def update(version: Version) -> dict[str, Any]:
    return {"lora": version.lora, "files": [str(version.folder / "adapter_model.safetensors")]}


async def sample(engine: Engine, tokens: int = 16, adapter: str = "", prompt: list[int] = PROMPT) -> Completion:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    (made,) = await asyncio.wait_for(engine.generate(prompt, sampling, adapter=adapter), 120)
    return made


def assert_sampled_by(version: Version, made: Completion, prompt: list[int] = PROMPT) -> None:
    np.testing.assert_allclose(made.logprobs, version.logprobs(made, prompt), atol=1e-4)


def cached() -> float:
    return float(CACHED._value.get())


async def test_a_version_computes_what_the_merged_model_does(engine: Engine, versions: dict[int, Version]) -> None:
    for number, version in versions.items():
        pause = await engine.load(number, update(version))
        made = await sample(engine)
        assert 0 < pause < 5
        assert [(s.version, s.start, s.end) for s in made.version_spans] == [(number, 0, 16)]
        assert_sampled_by(version, made)
        tokens = [*PROMPT, *made.token_ids.tolist()]
        np.testing.assert_allclose((await engine.logprobs(tokens))[-16:], version.logprobs(made, PROMPT), atol=1e-4)
        assert len(await engine.llm.list_loras()) == 1, "the one before is idle, so it went"


async def test_no_block_of_the_cache_is_shared_by_two_versions(engine: Engine, versions: dict[int, Version]) -> None:
    await engine.load(11, update(versions[1]))
    await sample(engine)
    before = cached()
    assert_sampled_by(versions[1], await sample(engine))
    assert cached() > before, "the second request of a version finds the blocks of the first"
    before = cached()
    await engine.load(12, update(versions[2]))
    assert_sampled_by(versions[2], await sample(engine))
    await engine.load(13, update(versions[1]))
    assert_sampled_by(versions[1], await sample(engine))
    assert cached() == before, "nor by two loads of one version"


async def test_a_request_ends_on_the_version_with_which_it_began(engine: Engine, versions: dict[int, Version]) -> None:
    await engine.load(1, update(versions[1]))
    long = asyncio.create_task(sample(engine, 1200))
    await asyncio.sleep(1.0)
    await engine.load(2, update(versions[2]))
    assert not long.done()
    assert len(await engine.llm.list_loras()) == 2
    assert_sampled_by(versions[2], await sample(engine))
    assert not long.done(), "both were sampled at once"
    made = await long
    assert [(s.version, s.start, s.end) for s in made.version_spans] == [(1, 0, 1200)]
    assert_sampled_by(versions[1], made)
    await engine.load(3, update(versions[3]))
    assert len(await engine.llm.list_loras()) == 1


async def test_a_load_waits_for_the_slot_of_a_version_that_still_samples(
    engine: Engine, versions: dict[int, Version]
) -> None:
    running = []
    for number, tokens in ((1, 400), (2, 1500), (3, 1500)):
        await engine.load(number, update(versions[number]))
        running.append(asyncio.create_task(sample(engine, tokens)))
        await asyncio.sleep(0.3)
    assert len(await engine.llm.list_loras()) == SLOTS
    await engine.load(4, update(versions[1]))
    assert running[0].done() and not running[2].done()
    assert len(await engine.llm.list_loras()) == SLOTS
    assert_sampled_by(versions[1], await sample(engine))
    for number, task in zip((1, 2, 3), running, strict=True):
        assert_sampled_by(versions[number], await task)


async def test_requests_that_are_cut_free_their_slot(engine: Engine, versions: dict[int, Version]) -> None:
    await engine.load(1, update(versions[1]))
    cut = asyncio.create_task(sample(engine, 1500))
    await asyncio.sleep(0.3)
    await engine.load(2, update(versions[2]))
    cut.cancel()
    await asyncio.wait([cut])
    await engine.load(3, update(versions[3]))
    assert len(await engine.llm.list_loras()) == 1
    assert_sampled_by(versions[3], await sample(engine))


async def test_named_adapters_of_several_ranks_are_sampled_together(
    engine: Engine, versions: dict[int, Version]
) -> None:
    for number in (1, 3):
        await engine.adapters.load(f"tenant {number}", versions[number].folder, serial=number)
    one, three, base = await asyncio.gather(*(sample(engine, 64, name) for name in ("tenant 1", "tenant 3", "")))
    assert_sampled_by(versions[1], one)
    assert_sampled_by(versions[3], three)
    assert [span.version for made in (one, three, base) for span in made.version_spans] == [1, 3, 0]
    assert not np.allclose(versions[1].logprobs(base, PROMPT), base.logprobs, atol=1e-2)
    await engine.adapters.drop("tenant 1")
    with pytest.raises(InvalidInput, match="adapter: is 'tenant 1', and this engine holds 'tenant 3'; load it first"):
        await sample(engine, 4, "tenant 1")
    for name in ("a", "b"):
        await engine.adapters.load(name, versions[1].folder)
    three, base = await asyncio.gather(sample(engine, 64, "tenant 3"), sample(engine, 64))
    assert_sampled_by(versions[3], three)
    policy = await engine.logprobs([*PROMPT, *base.token_ids.tolist()])
    np.testing.assert_allclose(policy[-64:], base.logprobs, atol=1e-4, err_msg="the base, beside full slots")
    with pytest.raises(Full, match=r"all 3 slots .* drop one before 'c' is loaded"):
        await engine.adapters.load("c", versions[1].folder)


async def test_what_vllm_refuses_leaves_the_adapter_before(
    engine: Engine, versions: dict[int, Version], quickstart_model: Path, tmp_path: Path
) -> None:
    await engine.load(1, update(versions[1]))
    large = make(quickstart_model, tmp_path / "large", 2, 16)
    with pytest.raises(EngineFailed, match="LoRA rank 16 is greater than max_lora_rank 8"):
        await engine.load(2, update(large))
    with pytest.raises(InvalidInput, match="cannot be loaded from"):
        await engine.adapters.load("other", tmp_path)
    made = await sample(engine)
    assert [span.version for span in made.version_spans] == [1]
    assert_sampled_by(versions[1], made)


async def test_a_pool_loads_published_versions_and_the_base_again(
    engine: Engine, versions: dict[int, Version], quickstart_model: Path, tmp_path: Path
) -> None:
    pool, cache = EnginePool([engine]), WeightCache(tmp_path / "cache", "run", ["folder"], "")
    published = manifest(versions[2], tmp_path / "v2", 2)
    info, transport = fetch_adapters(cache, published, str(quickstart_model))
    assert transport == "folder" and len(info["files"]) == 2
    serial, _ = await pool.load(2, info)
    pool.loads.trust(serial)
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    (made,) = await pool.generate(PROMPT, sampling)
    assert [(span.version, span.precision) for span in made.version_spans] == [(2, "float32")]
    assert_sampled_by(versions[2], made)
    base = Manifest("run", 0, 0, (), (), (), 0.0, str(quickstart_model))
    info, _ = fetch_adapters(cache, base, str(quickstart_model))
    serial, _ = await pool.load(0, info)
    pool.loads.trust(serial)
    (made,) = await pool.generate(PROMPT, sampling)
    assert [span.version for span in made.version_spans] == [0]
    assert not np.allclose(versions[2].logprobs(made, PROMPT), made.logprobs, atol=1e-2)


async def test_the_model_of_a_call_to_the_endpoint_chooses_the_adapter(
    engine: Engine, versions: dict[int, Version], quickstart_model: Path
) -> None:
    pool, port = EnginePool([engine]), free_port()
    template = ChatTokenizer(ModelConfig(model_path=str(quickstart_model))).template
    served = {"one": versions[1].folder, "three": versions[3].folder}
    about = (str(quickstart_model), "the base", template, PARSERS, served)
    serving = asyncio.create_task(endpoint.serve(pool, f"127.0.0.1:{port}", None, Bounds(), *about))
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=60)
    try:
        assert {model.id for model in (await client.models.list()).data} == {"the base", "one", "three"}
        pool.loads.hide_initial_weights()  # a verdict on the policy's weights is none on another adapter
        pool.loads.trust(pool.loads.begin(1))

        async def ask(model: str) -> tuple[np.ndarray, Completion]:
            found = await client.completions.create(
                model=model, prompt=PROMPT, max_tokens=12, logprobs=1, extra_body={"return_token_ids": True}
            )
            logprobs = np.array(found.choices[0].logprobs.token_logprobs)
            return logprobs, Completion(np.array(found.choices[0].token_ids), logprobs, (), "length")  # type: ignore[attr-defined]

        asked = await asyncio.gather(ask("one"), ask("three"))
        for number, (logprobs, made) in zip((1, 3), asked, strict=True):
            np.testing.assert_allclose(logprobs, versions[number].logprobs(made, PROMPT), atol=1e-4)
        with pytest.raises(openai.NotFoundError, match="two"):
            await ask("two")
        tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
        asking: Any = {"messages": [{"role": "user", "content": "1+1"}], "tools": [tool], "max_tokens": 4}
        choices: Any = ("auto", {"type": "function", "function": {"name": "add"}})
        for choice in choices:
            said = await client.chat.completions.create(model="one", tool_choice=choice, **asking)
            assert said.choices[0].finish_reason is not None
    finally:
        serving.cancel()
        await asyncio.wait([serving])
        await client.close()


async def test_adapters_beside_a_quantized_base(quickstart_model: Path, versions: dict[int, Version]) -> None:
    args = {"quantization": "int8_per_channel_weight_only"}  # FP8 needs a GPU
    options = EngineOptions(
        str(quickstart_model), "cpu", LENGTH, dtype="bfloat16", engine_args=args, adapters=2, adapter_rank=RANK
    )
    engine = await Engine.start(options)
    try:
        await engine.load(1, update(versions[2]))
        made = await sample(engine)
        expected = versions[2].logprobs(made, PROMPT)
        assert np.abs(made.logprobs - expected).mean() < 0.05
    finally:
        engine.close()
