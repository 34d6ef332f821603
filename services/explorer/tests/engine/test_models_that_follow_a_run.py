"""Auxiliary models that load the newest checkpoint of a job folder, as an opponent that another run trains."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from trinity.config.schema.explorer import AuxiliaryModelConfig
from trinity.explorer.engine.auxiliary import AuxiliaryModels, Judge, prepare
from trinity.explorer.engine.folder import FolderFollower
from trinity.explorer.types import EngineFailed, EngineOptions
from trinity.runtime.errors import InvalidInput
from trinity.weights.checkpoint_manifest import ManifestWriter, verify_model
from trinity.weights.checkpoints import COMPLETE, checkpoint_folder, model_folder

TOKENS, PROMPT = [5, 6, 7, 8, 9, 10], 2


class _Pool:
    """Notes what is loaded; the step `wrong` cannot be."""

    def __init__(self, wrong: int = -1) -> None:
        self.loaded: list[int] = []
        self.loads = SimpleNamespace(trust=lambda serial: None)
        self._wrong = wrong

    async def load(self, step: int, arguments: Any) -> tuple[int, float]:
        if step == self._wrong:
            raise EngineFailed("the engine has other shapes")
        self.loaded.append(step)
        return step, 0.0

    async def check(self) -> None:
        return

    def close(self) -> None:
        return


def save(job: Path, step: int, model: Path) -> Path:
    """A complete checkpoint with other weights than the model's. Returns its model's folder."""
    folder = model_folder(job, step)
    changed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(step)
    for weight in changed.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    changed.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, folder)
    ManifestWriter(checkpoint_folder(job, step)).write()
    (checkpoint_folder(job, step) / COMPLETE).touch()
    return folder


@pytest.mark.core
async def test_the_newest_checkpoint_is_loaded_and_then_each_that_comes(
    quickstart_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity.explorer.engine.folder._POLL_SECONDS", 0.02)
    pool: Any = _Pool(wrong=15)
    judge = Judge(pool, None)  # type: ignore[arg-type]
    assert judge.step is None, "its weights stay"
    await judge.follow(tmp_path / "job")
    assert (judge.step, pool.loaded) == (0, [])
    for step in (5, 10):
        save(tmp_path / "job", step, quickstart_model)
        async with asyncio.timeout(20):
            while judge.step != step:
                await asyncio.sleep(0.02)
                await judge.check()
    save(tmp_path / "job", 15, quickstart_model)
    with pytest.raises(EngineFailed, match="could not load a checkpoint: the engine has other shapes"):
        async with asyncio.timeout(20):
            while True:
                await judge.check()
                await asyncio.sleep(0.02)
    judge.close()
    assert pool.loaded == [5, 10]


@pytest.mark.core
async def test_a_changed_checkpoint_is_refused_and_the_one_before_stays(quickstart_model: Path, tmp_path: Path) -> None:
    pool: Any = _Pool()
    save(tmp_path, 5, quickstart_model)
    follower = FolderFollower(tmp_path, pool)
    await follower.load_newest()
    config = save(tmp_path, 10, quickstart_model) / "config.json"
    config.write_text(config.read_text() + " ")
    await follower.load_newest()
    assert (follower.version, pool.loaded) == (5, [5])


@pytest.mark.core
@pytest.mark.parametrize("at", ["verify_model", "load"])
async def test_a_checkpoint_that_is_removed_meanwhile_is_passed_over(
    at: str, quickstart_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool: Any = _Pool(wrong=5)
    save(tmp_path, 5, quickstart_model)

    def remove(*_: object) -> None:
        shutil.rmtree(checkpoint_folder(tmp_path, 5))

    if at == "load":
        load = pool.load

        async def removed(*given: Any) -> Any:
            remove()
            return await load(*given)

        pool.load = removed
    else:
        monkeypatch.setattr(
            "trinity.explorer.engine.folder.verify_model", lambda model: remove() or verify_model(model)
        )
    follower = FolderFollower(tmp_path, pool)
    await follower.load_newest()
    assert follower.version == 0
    monkeypatch.undo()
    pool.load = _Pool.load.__get__(pool)
    save(tmp_path, 10, quickstart_model)
    await follower.load_newest()
    assert (follower.version, pool.loaded) == (10, [10])


@pytest.mark.core
async def test_a_step_that_is_saved_again_is_loaded_again(quickstart_model: Path, tmp_path: Path) -> None:
    pool: Any = _Pool()
    follower = FolderFollower(tmp_path, pool)
    for _ in range(2):
        save(tmp_path, 5, quickstart_model)
        await follower.load_newest()
        await follower.load_newest()
    assert pool.loaded == [5, 5]


@pytest.mark.core
def test_a_model_that_rates_follows_no_run(quickstart_model: Path) -> None:
    options = EngineOptions(model=str(quickstart_model), device="cpu", max_model_len=256)
    config = AuxiliaryModelConfig(model_path=str(quickstart_model), name="rater", kind="score", follows="/job")
    with pytest.raises(InvalidInput, match="'rater', which rates; only models that write follow a run"):
        prepare(config, options)


def expected(model: Path) -> np.ndarray:
    """The log-probabilities of the tokens after the prompt, by transformers."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([TOKENS])).logits[0]
    logprobs = torch.log_softmax(logits, -1)[range(len(TOKENS) - 1), TOKENS[1:]]
    return logprobs[PROMPT - 1 :].numpy()


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_engine_has_the_weights_of_the_run_that_it_follows(quickstart_model: Path, tmp_path: Path) -> None:
    found: list[Sequence[float]] = []

    async def ask() -> None:
        options = EngineOptions(model=str(quickstart_model), device="cpu", max_model_len=256)
        config = AuxiliaryModelConfig(model_path=str(quickstart_model), name="rival", follows=str(tmp_path / "job"))
        models = await AuxiliaryModels.start([config], options, [])
        try:
            rival = models.judge("rival")
            found.append((await rival.teach(TOKENS, PROMPT)).logprobs)
            save(tmp_path / "job", 20, quickstart_model)
            async with asyncio.timeout(60):
                while rival.step != 20:
                    await asyncio.sleep(0.1)
            await models.check()
            found.append((await rival.teach(TOKENS, PROMPT)).logprobs)
        finally:
            models.close()

    asyncio.run(ask())
    for logprobs, model in zip(found, (quickstart_model, model_folder(tmp_path / "job", 20)), strict=True):
        np.testing.assert_allclose(logprobs, expected(model), atol=1e-4)
    before, after = found
    assert np.abs(np.subtract(before, after)).max() > 0.1
