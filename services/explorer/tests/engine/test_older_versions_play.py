"""Older versions that play seats: which one is chosen, whose adapters sample, and what is refused."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trinity.config.schema.explorer import OlderVersionsConfig
from trinity.data.experience import SamplingParams, VersionSpan
from trinity.explorer.engine.auxiliary import AuxiliaryModels
from trinity.explorer.engine.engine import Using
from trinity.explorer.engine.older import OlderVersions
from trinity.explorer.rollout.toolbox import ExplorerTools
from trinity.explorer.types import Completion
from trinity.runtime.errors import DataLoss, InvalidInput, Unavailable
from trinity.weights.client import Version
from trinity.weights.lora import Lora
from trinity.weights.manifest import Canary, FileInfo, Manifest, Probe
from trinity.weights.wire import VersionState

pytestmark = pytest.mark.core

CANARY = Canary((Probe((1, 2, 3), (-1.0, -1.0)),), 0.1, 0.2)


class _Adapters:
    def __init__(self) -> None:
        self.named: dict[str, tuple[int, bool]] = {}

    @property
    def names(self) -> list[str]:
        return list(self.named)

    async def load(self, name: str, folder: Path | None, serial: int) -> None:
        assert folder is None or (folder / "adapter_config.json").exists()
        self.named[name] = (serial, folder is None)

    async def drop(self, name: str) -> None:
        del self.named[name]


class _Options:
    precision, max_model_len = "float32", 64


class _Engine:
    """Computes -1 for each token, and -3 with version 30."""

    options = _Options()

    def __init__(self) -> None:
        self.adapters = _Adapters()

    @contextlib.asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[Using]:
        yield Using(name, [self.adapters.named[name][0]], 1)

    async def logprobs(self, token_ids: Sequence[int], images: Any, adapter: str) -> np.ndarray:
        return np.full(len(token_ids) - 1, -3.0 if adapter == "30" else -1.0, np.float32)

    async def generate(self, prompt: Any, sampling: Any, images: Any, adapter: str) -> list[Completion]:
        serial, _ = self.adapters.named[adapter]
        made = np.array([7], np.int32), np.zeros(1, np.float32)
        return [Completion(*made, (VersionSpan(serial, 0, 1),), "stop")] * sampling.n


class _Pool:
    def __init__(self) -> None:
        self.engines = [_Engine(), _Engine()]

    @contextlib.asynccontextmanager
    async def engine_for(self, tokens: Sequence[int], sequences: int = 1) -> AsyncIterator[_Engine]:
        yield self.engines[tokens[0]]


def older(step: int, tmp_path: Path, bare: Sequence[int] = (), **states: VersionState) -> tuple[_Pool, OlderVersions]:
    """The versions are RETIRED if `states` does not say otherwise: v10=... The service knows no files of `bare`."""
    pool = _Pool()
    (tmp_path / "adapter").touch()

    async def find(version: int) -> Version | None:
        files = (FileInfo("adapter", 1, "0" * 64),) if version and version not in bare else ()
        manifest = Manifest("run", version, version, (), files, (), 1.0, canary=CANARY)
        return Version(manifest, states.get(f"v{version}", VersionState.RETIRED))

    def fetch(manifest: Manifest) -> tuple[dict[str, Any], str]:
        files = [str(tmp_path / "adapter")] if manifest.version else []
        return {"lora": Lora(8, 16.0, ()), "files": files}, "folder"

    config = OlderVersionsConfig(every=10, keep=3)
    return pool, OlderVersions(pool, find, fetch, lambda: step, config)  # type: ignore[arg-type]


async def test_each_of_the_newest_older_versions_is_chosen_as_often(tmp_path: Path) -> None:
    _, versions = older(45, tmp_path)
    chosen = Counter([await versions.choose(f"task-{index}") for index in range(300)])
    assert sorted(chosen) == [20, 30, 40]
    assert min(chosen.values()) > 70
    assert await versions.choose("task-1") == await versions.choose("task-1")


async def test_withdrawn_versions_do_not_play(tmp_path: Path) -> None:
    gone = {"v20": VersionState.REJECTED, "v40": VersionState.STAGED}
    _, versions = older(45, tmp_path, **gone)
    assert {await versions.choose(f"task-{index}") for index in range(50)} == {30}
    _, versions = older(45, tmp_path, v30=VersionState.REJECTED, **gone)
    with pytest.raises(Unavailable, match="none of the older versions 20, 30, 40 can play"):
        await versions.choose("task-1")


async def test_a_version_without_files_plays_no_more_and_is_not_the_base_model(tmp_path: Path) -> None:
    pool, versions = older(45, tmp_path, bare=[20, 40])
    assert {await versions.choose(f"task-{index}") for index in range(50)} == {30}
    with pytest.raises(Unavailable, match="the files of version 40 are gone"):
        await versions.generate(40, [0, 1], SamplingParams(max_tokens=4))
    assert pool.engines[0].adapters.named == {}


async def test_each_engine_loads_a_version_once_and_names_it_in_spans(tmp_path: Path) -> None:
    pool, versions = older(25, tmp_path)
    for version in (0, 10, 0, 20, 10):
        made = await versions.generate(version, [0, 1], SamplingParams(max_tokens=4, n=2))
        assert [one.version_spans for one in made] == [(VersionSpan(version, 0, 1),)] * 2
    assert pool.engines[0].adapters.named == {"0": (0, True), "10": (10, False), "20": (20, False)}
    assert pool.engines[1].adapters.named == {}


def toolbox(pool: Any) -> ExplorerTools:
    names = ("prompt", "next_turn", "placed", "tokens", "text", "reply", "observed", "episode", "until_served")
    parts: Any = SimpleNamespace(model_path="model", **dict.fromkeys(names))
    return ExplorerTools(pool, parts, parts, AuxiliaryModels({}), 100, 100)


async def test_a_toolbox_of_an_older_version_samples_from_it(tmp_path: Path) -> None:
    pool, versions = older(15, tmp_path)
    pool.generate = None  # type: ignore[attr-defined]
    tools = toolbox(pool)
    tools.older_versions = versions
    version, by_it = await tools.older("task-1")
    (made,) = await by_it.generate([0, 1], SamplingParams(max_tokens=4))
    assert made.version_spans == (VersionSpan(version, 0, 1),)
    assert by_it is not tools and list(pool.engines[0].adapters.named) == [str(version)]


async def test_a_seat_that_only_a_row_asks_for_is_refused() -> None:
    pool: Any = SimpleNamespace(generate=None)
    with pytest.raises(InvalidInput, match="has a seat 'older', and the YAML's tasksets have none"):
        await toolbox(pool).older("task-1")


async def test_a_version_whose_canary_fails_here_samples_nothing(tmp_path: Path) -> None:
    pool, versions = older(45, tmp_path)
    with pytest.raises(DataLoss, match="computes other log-probabilities than the trainer"):
        await versions.generate(30, [0, 1], SamplingParams(max_tokens=4))
    assert pool.engines[0].adapters.named == {}
