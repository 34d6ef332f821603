"""New weights in real vLLM engines: canaries, exact spans, no stale key-value block, repair and the way back."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from support.servers.shared_engine import ENGINE_TESTS, SEQUENCES, update_info
from trinity.data.experience import SamplingParams
from trinity.explorer.engine import start
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.types import Completion, EngineFailed, EngineOptions
from trinity.explorer.weights.load_history import WeightsWithdrawn
from trinity.explorer.weights.loader import fetch
from trinity.weights.manifest import Canary, Manifest, Probe

pytestmark = [pytest.mark.extended, *ENGINE_TESTS]

TOLERANCE = 1e-4
PROMPT = [(7 * i * i + 3 * i) % 250 for i in range(600)]  # more than four key-value blocks of a CPU
PROBES = [[(11 * i + k) % 250 for i in range(24)] for k in range(3)]


@dataclass(frozen=True)
class Weights:
    """A version of the model: its folder, and transformers' model."""

    folder: Path
    policy: Any

    @property
    def update_info(self) -> dict[str, Any]:
        return update_info(self.folder)

    def logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """Of every token but the first."""
        ids = torch.tensor(list(token_ids))[None]
        with torch.no_grad():
            logs = torch.log_softmax(self.policy(ids).logits[0, :-1].float(), -1)
        return logs.gather(1, ids[0, 1:, None])[:, 0].numpy()

    @property
    def canary(self) -> Canary:
        probes = tuple(Probe(tuple(probe), tuple(self.logprobs(probe).tolist())) for probe in PROBES)
        return Canary(probes, TOLERANCE, 10 * TOLERANCE)


def make_weights(folder: Path, source: Path, seed: int, tied: bool = False) -> Weights:
    """The quickstart's model, with other weights for every seed but 0."""
    torch.manual_seed(seed)
    policy = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    if tied:
        policy.config.tie_word_embeddings = True
        policy = type(policy)(policy.config)
    with torch.no_grad():
        for parameter in policy.parameters() if seed else ():
            parameter.add_(0.05 * torch.randn_like(parameter))
    policy.save_pretrained(folder)
    return Weights(folder, policy.eval())


@pytest.fixture(scope="module")
def versions(quickstart_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    root = tmp_path_factory.mktemp("versions")
    return [make_weights(root / f"v{version}", quickstart_model, version) for version in range(3)]


async def load(pool: EnginePool, version: int, weights: Weights, trust: bool = True) -> int:
    serial, _ = await pool.load(version, weights.update_info)
    if trust:
        pool.loads.trust(serial)
    return serial


async def sample(pool: EnginePool, prompt: list[int], tokens: int) -> Completion:
    sampling = SamplingParams(temperature=1.0, max_tokens=tokens, n=1, ignore_eos=True)
    return (await asyncio.wait_for(pool.generate(prompt, sampling), 120))[0]


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def test_every_version_shows_its_own_canary_and_no_other(pool: EnginePool, versions: list[Weights]) -> None:
    for version in (1, 2, 0):
        await load(pool, version, versions[version])
        for other, weights in enumerate(versions):
            measured = await pool.measure(weights.canary)
            assert measured.within(weights.canary) is (other == version), (version, other, measured)


async def test_a_value_that_is_not_finite_fails_the_canary(
    pool: EnginePool, versions: list[Weights], tmp_path: Path
) -> None:
    tensors = load_file(versions[1].folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], torch.nan)
    save_file(tensors, tmp_path / "model.safetensors")
    await load(pool, 1, Weights(tmp_path, None))
    measured = await pool.measure(versions[1].canary)
    assert math.isnan(measured.mean_error)
    assert not measured.within(versions[1].canary)
    await load(pool, 1, versions[1])
    assert (await pool.measure(versions[1].canary)).within(versions[1].canary)


async def test_a_canary_does_not_queue_behind_rollouts(pool: EnginePool, versions: list[Weights]) -> None:
    await load(pool, 1, versions[1])
    running = [asyncio.create_task(sample(pool, PROMPT, 200)) for _ in range(12)]
    await asyncio.sleep(0.3)
    begin = time.monotonic()
    assert (await pool.measure(versions[1].canary)).within(versions[1].canary)
    took, finished = time.monotonic() - begin, sum(task.done() for task in running)
    await asyncio.gather(*running)
    print(f"canary among {len(running)} requests: {took:.3f} s; {finished} finished meanwhile")
    assert finished <= 4


async def cross_a_load(pool: EnginePool, versions: list[Weights]) -> list[Completion]:
    """Copies of one prompt, two of them running and the others in vLLM's queue when version 2 replaces version 1."""
    await load(pool, 1, versions[1])
    await sample(pool, PROMPT, 1)  # blocks of version 1 are in the cache
    copies = [asyncio.create_task(sample(pool, PROMPT, 30)) for _ in range(16)]
    await until(lambda: sum(task.done() for task in copies) >= 2)
    await load(pool, 2, versions[2])
    return list(await asyncio.gather(*copies))


def first_token_errors(completions: list[Completion], versions: list[Weights]) -> list[tuple[int, float]]:
    """(version that sampled it, difference to what transformers says of that version) of every first token."""
    found = []
    for completion in completions:
        version = completion.version_spans[0].version
        expected = versions[version].logprobs([*PROMPT, int(completion.token_ids[0])])[-1]
        found.append((version, abs(float(expected) - float(completion.logprobs[0]))))
    return found


async def test_no_key_value_block_of_old_weights_serves_a_request_that_waited_during_a_load(
    pool: EnginePool, versions: list[Weights]
) -> None:
    completions = await cross_a_load(pool, versions)
    errors = first_token_errors(completions, versions)
    assert {version for version, _ in errors} == {1, 2}, "the load was not in the middle"
    assert sum(version == 2 for version, _ in errors) >= 4
    assert max(error for _, error in errors) < TOLERANCE, errors


async def test_blocks_are_still_shared_between_loads(pool: EnginePool, versions: list[Weights]) -> None:
    from vllm import SamplingParams as VllmSampling
    from vllm import TokensPrompt

    async def cached(request: str) -> int:
        engine = pool.engines[0]
        prompt = TokensPrompt(prompt_token_ids=PROMPT, cache_salt=engine.cache_salt)
        outputs = [o async for o in engine.llm.generate(prompt, VllmSampling(max_tokens=1), request_id=request)]
        return int(outputs[-1].num_cached_tokens)

    await load(pool, 1, versions[1])
    assert await cached("a") == 0
    assert await cached("b") >= 512
    await load(pool, 1, versions[1])
    assert await cached("c") == 0, "the same version again is another load"


async def test_a_response_over_two_updates_has_three_spans_that_can_be_recomputed(
    pool: EnginePool, versions: list[Weights]
) -> None:
    await load(pool, 0, versions[0])
    prompt = PROMPT[:40]
    running = [asyncio.create_task(sample(pool, prompt, 900)) for _ in range(2)]
    for version in (1, 2):
        before = pool.tokens_generated
        await asyncio.sleep(0.4)
        assert pool.tokens_generated == before, "it ended too soon"
        await load(pool, version, versions[version])
    for completion in await asyncio.gather(*running):
        assert [span.version for span in completion.version_spans] == [0, 1, 2]
        assert (completion.version_spans[0].start, completion.version_spans[-1].end) == (0, 900)
        expected = recompute(prompt, completion, versions)
        print(
            f"spans {completion.version_spans}: largest difference {np.abs(completion.logprobs - expected).max():.2e}"
        )
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
        wrong = recompute(prompt, completion, [versions[1]] * 3)
        assert np.abs(completion.logprobs - wrong).max() > 0.01, "the versions do not differ"


def recompute(prompt: list[int], completion: Completion, versions: list[Weights]) -> np.ndarray:
    """Every span by its own version, on keys and values that the versions before it left: as the engine did it."""
    tokens = [*prompt, *completion.token_ids.tolist()]
    cache, at, found = DynamicCache(), 0, []
    for span in completion.version_spans:
        end = len(prompt) + span.end - 1
        ids = torch.tensor(tokens[at:end])[None]
        with torch.no_grad():
            logits = versions[span.version].policy(ids, past_key_values=cache, use_cache=True).logits[0].float()
        targets = torch.tensor(tokens[len(prompt) + span.start : len(prompt) + span.end])
        logs = torch.log_softmax(logits[-len(targets) :], -1)
        found.append(logs.gather(1, targets[:, None])[:, 0].numpy())
        at = end
    return np.concatenate(found)


async def test_responses_are_held_back_until_their_weights_are_known_to_be_good(
    pool: EnginePool, versions: list[Weights]
) -> None:
    await load(pool, 0, versions[0])
    serial = await load(pool, 1, versions[1], trust=False)
    response = asyncio.create_task(sample(pool, PROMPT[:8], 4))
    generated = pool.tokens_generated
    await until(lambda: pool.tokens_generated > generated)
    await asyncio.sleep(0.2)
    assert not response.done()
    pool.loads.pass_canary(serial)
    pool.loads.verify(1)
    assert [span.version for span in (await asyncio.wait_for(response, 5)).version_spans] == [1]

    await load(pool, 2, versions[2], trust=False)
    response = asyncio.create_task(sample(pool, PROMPT[:8], 4))
    await asyncio.sleep(0.2)
    pool.loads.reject([2], "was rejected")
    with pytest.raises(WeightsWithdrawn, match="version 2, which was rejected"):
        await asyncio.wait_for(response, 5)
    waiting = asyncio.create_task(sample(pool, PROMPT[:8], 4))
    await asyncio.sleep(0.2)
    assert not waiting.done(), "it was sampled by weights known to be wrong"
    await load(pool, 1, versions[1])
    assert [span.version for span in (await asyncio.wait_for(waiting, 20)).version_spans] == [1]


async def test_a_load_that_breaks_off_is_repaired_by_a_full_one(pool: EnginePool, versions: list[Weights]) -> None:
    await load(pool, 1, versions[1])
    broken = versions[2].update_info
    broken["tensors"] = [*broken["tensors"][: len(broken["tensors"]) // 2], ["no.such.tensor", 0]]
    with pytest.raises(EngineFailed, match="paused"):
        await pool.load(2, broken)
    waiting = asyncio.create_task(sample(pool, PROMPT[:8], 8))
    await asyncio.sleep(0.5)
    assert not waiting.done(), "it went on with part of the weights new"
    await load(pool, 1, versions[1])
    assert (await pool.measure(versions[1].canary)).within(versions[1].canary)
    completion = await waiting
    expected = versions[1].logprobs([*PROMPT[:8], *completion.token_ids.tolist()])[7:]
    np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)


async def test_version_0_comes_back_from_the_base_models_own_files(pool: EnginePool, versions: list[Weights]) -> None:
    await load(pool, 2, versions[2])
    base = Manifest("run", 0, 0, (), (), (), 1.0, base_model="elsewhere")
    update_info, _ = fetch(Any, base, str(versions[0].folder))  # type: ignore[arg-type]
    await pool.load(0, update_info)
    assert (await pool.measure(versions[0].canary)).within(versions[0].canary)


async def test_a_canary_catches_tied_embeddings_that_are_not_reloaded(
    quickstart_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM on a CPU keeps using the old output head; the worker repairs that. Without the repair the canary fails."""
    base = make_weights(tmp_path / "base", quickstart_model, 0, tied=True)
    new = make_weights(tmp_path / "new", base.folder, 5)
    (tmp_path / "unrepaired_worker.py").write_text(
        "from trinity.explorer.engine import worker\n"
        "from trinity.explorer.engine.worker import WorkerExtension as Repaired\n"
        "repair, worker._repack_tied_heads = worker._repack_tied_heads, lambda model: None\n"
        "class WorkerExtension(Repaired):\n"
        "    def repair_from_now_on(self):\n"
        "        worker._repack_tied_heads = repair\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(start, "_WORKER", "unrepaired_worker.WorkerExtension")
    options = EngineOptions(str(base.folder), "cpu", 256, max_num_seqs=SEQUENCES)
    tied = await EnginePool.start(options, [None])
    try:
        assert "lm_head.weight" not in [name for name, _ in new.update_info["tensors"]]
        assert (await tied.measure(base.canary)).within(base.canary)
        await load(tied, 1, new)
        measured = await tied.measure(new.canary)
        print(f"tied, not repaired: {measured}")
        assert not measured.within(new.canary)
        await tied.engines[0].llm.collective_rpc("repair_from_now_on")
        await load(tied, 1, new)
        assert (await tied.measure(new.canary)).within(new.canary)
    finally:
        tied.close()
