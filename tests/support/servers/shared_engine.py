"""A plugin of pytest: one vLLM engine for all tests of a worker that only need one which runs.

It is started by the first test that asks for it, is as long as any of them needs, and begins each test with the weights
of the quickstart's model: a full load takes a fraction of a second, repairs what a test broke off, and leaves no
key-value block to the next test. Such tests run in the loop of the session (`ENGINE_TESTS`), and in the same worker.
Tests of an engine's start or end, or of another model, start their own.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from trinity.explorer.engine.engine import Engine
    from trinity.explorer.engine.pool import EnginePool

MAX_LENGTH = 2048
SEQUENCES = 2  # at a time, so that a test can have requests that wait in vLLM's queue
ENGINE_TESTS = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
]
_RESET_SECONDS = 60.0


class SharedEngine:
    """Started on first use, and again if a test left it in a state that no load repairs."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._engine: Engine | None = None

    async def begin_test(self) -> "Engine":
        """The engine, idle, with the model's own weights as serial 0."""
        from trinity.data.experience import SamplingParams
        from trinity.explorer.engine.engine import Engine
        from trinity.explorer.types import EngineFailed, EngineOptions

        if self._engine is not None:
            try:
                async with asyncio.timeout(_RESET_SECONDS):
                    await self._reset(self._engine)
                return self._engine
            except (EngineFailed, TimeoutError):
                self.close()
        options = EngineOptions(str(self._model), "cpu", MAX_LENGTH, max_num_seqs=SEQUENCES)
        self._engine = await Engine.start(options)
        await self._engine.generate([1, 2, 3], SamplingParams(max_tokens=2))  # the first batch takes seconds
        return self._engine

    async def _reset(self, engine: "Engine") -> None:
        await engine.load(0, update_info(self._model))
        while engine.llm.output_processor.has_unfinished_requests():
            await asyncio.sleep(0.05)
        await engine.check()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def update_info(folder: Path) -> dict[str, Any]:
    """A whole model's files as the worker's UpdateInfo names them."""
    from trinity.weights.manifest import manifest_of_folder

    files, tensors = manifest_of_folder("run", 1, folder, checksums=False).load_arguments(folder)
    return {"files": files, "tensors": [list(tensor) for tensor in tensors]}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_engine(quickstart_model: Path) -> AsyncIterator[SharedEngine]:
    shared = SharedEngine(quickstart_model)
    yield shared
    shared.close()


@pytest_asyncio.fixture(loop_scope="session")
async def engine(shared_engine: SharedEngine) -> "Engine":
    """The worker's engine with the weights of the quickstart's model."""
    return await shared_engine.begin_test()


@pytest_asyncio.fixture(loop_scope="session")
async def pool(engine: "Engine") -> "EnginePool":
    """The worker's engine as the only one of an explorer that has loaded nothing yet."""
    from trinity.explorer.engine.pool import EnginePool

    return EnginePool([engine])
