"""An engine for a test's explorer: all of `engine.Engine` but vLLM. Its weights are read from files, or received.

The "model" gives a log-probability to a token after another one, and every tensor has its part in it: who holds a wrong
tensor, or tensors of two versions, computes something else. So canaries and responses mean what they mean with vLLM.
"""

import asyncio
import contextlib
import json
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from trinity.data.experience import SamplingParams, VersionSpan
from trinity.explorer.engine import pool
from trinity.explorer.types import Completion, EngineFailed, EngineOptions, EngineUsage, spans_of
from trinity.explorer.weights.loader import base_folder
from trinity.weights.collective import Group, Store, receive
from trinity.weights.manifest import TensorInfo

VOCABULARY = 96
TENSOR_SECONDS = 0.005
Weights = Mapping[str, np.ndarray]


def logprobs(weights: Weights, token_ids: Sequence[int]) -> np.ndarray:
    """float32 [L - 1]: of each of L tokens but the first, after the one before it."""
    before, now = np.asarray(token_ids[:-1], np.int64), np.asarray(token_ids[1:], np.int64)
    found = np.zeros(len(now), np.float32)
    for index, name in enumerate(sorted(weights)):
        flat = weights[name].reshape(-1)
        found += flat[(before * 1_009 + now * 131 + index * 17) % flat.size]
    return -np.abs(found)


def read_weights(files: Iterable[Path]) -> dict[str, np.ndarray]:
    """All tensors of some safetensors files."""
    found = {}
    for path in files:
        with safe_open(path, framework="np") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


class Marks:
    """Marks of the explorer's current activity, as lines of a file, so that a test can strike at that moment."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, what: str, **about: Any) -> None:
        os.write(self._file, json.dumps({"what": what, **about}).encode() + b"\n")


class MemberEngine:
    """`marks` is set before the first one starts."""

    marks: Marks
    token_seconds = 0.004

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.serial = 0
        self.tokens_generated = 0
        self.usage = EngineUsage()
        self._weights = read_weights(base_folder(options.model).glob("*.safetensors"))
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._loading = asyncio.Lock()
        self._random = random.Random()
        self._membership: _Membership | None = None

    @classmethod
    def take_over(cls) -> None:
        """Every explorer that starts in this process has engines of this class."""

        async def start(options: EngineOptions, devices: Sequence[str | None]) -> list[Any]:
            return [cls(options) for _ in devices]

        pool.start_engines = start

    @contextlib.asynccontextmanager
    async def no_load(self) -> AsyncIterator[None]:
        async with self._loading:
            yield

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, images: Any = ()
    ) -> list[Completion]:
        async with self._loading:
            pass
        tasks = [self._complete(list(prompt_token_ids), sampling) for _ in range(sampling.n)]
        return list(await asyncio.gather(*tasks))

    async def _complete(self, tokens: list[int], sampling: SamplingParams) -> Completion:
        sampled: list[int] = []
        logs: list[float] = []
        spans: list[tuple[VersionSpan, int]] = []
        ended = False
        while not ended and len(sampled) < sampling.max_tokens:
            await asyncio.sleep(self.token_seconds)
            await self._goes_on.wait()
            token, logprob = await self._next(tokens, sampling)
            logs.append(logprob)
            tokens.append(token)
            sampled.append(token)
            spans.append((VersionSpan(self.serial, 0, len(sampled)), len(sampled)))
            ended = self._ends(token, sampling)
        self.tokens_generated += len(sampled)
        found = np.array(sampled, np.int32), np.array(logs, np.float32)
        return Completion(*found, spans_of(spans), "stop" if ended else "length")

    async def _next(self, tokens: Sequence[int], sampling: SamplingParams) -> tuple[int, float]:
        return self._sample(tokens, sampling)

    def _sample(self, tokens: Sequence[int], sampling: SamplingParams) -> tuple[int, float]:
        """The next token and its log-probability."""
        token = self._random.randrange(VOCABULARY)
        return token, float(logprobs(self._weights, [tokens[-1], token])[0])

    def _ends(self, token: int, sampling: SamplingParams) -> bool:
        return False

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[bytes] = ()) -> np.ndarray:
        return logprobs(self._weights, token_ids)

    async def load(self, serial: int, update_info: dict[str, Any]) -> float:
        """A load that breaks off leaves a mixture, paused."""
        async with self._loading:
            begin = time.monotonic()
            self._goes_on.clear()
            try:
                await asyncio.to_thread(self._take, update_info)
            except Exception as error:
                raise EngineFailed(f"loading failed, the engine is paused: {error}") from error
            self.serial = serial
            self._goes_on.set()
            return time.monotonic() - begin

    def _take(self, update: dict[str, Any]) -> None:
        for index, (name, tensor) in enumerate(self._given(update)):
            self.marks.note("loading", tensor=index, collective=bool(update.get("epoch")))
            if name not in self._weights or self._weights[name].shape != tuple(tensor.shape):
                raise KeyError(f"no tensor {name} of shape {tuple(tensor.shape)} in this model")
            self._weights[name] = tensor.numpy().copy()
            time.sleep(TENSOR_SECONDS)

    def _given(self, update: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        return self._received(update) if update.get("epoch") else read_tensors(update["files"], update["tensors"])

    def _received(self, update: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._membership is not None, "it is in no group"
        infos = [TensorInfo(name, dtype, tuple(shape), size, "") for name, dtype, shape, size in update["tensors"]]
        return receive(self._membership.group(update["epoch"]), infos, update["bucket_bytes"])

    async def enter_group(self, init_info: dict[str, Any]) -> None:
        if self._membership is not None:
            self._membership.close()
        self._membership = _Membership(init_info)

    async def check(self) -> None:
        """It never fails by itself."""

    def close(self) -> None:
        if self._membership is not None:
            self._membership.close()


class _Membership:
    """Like engine.worker.Membership: entered in a thread."""

    def __init__(self, info: dict[str, Any]) -> None:
        self._info = info
        self._group: Group | None = None
        self._thread = threading.Thread(target=self._enter, daemon=True)
        self._thread.start()

    def _enter(self) -> None:
        info, limit = self._info, self._info["timeout_seconds"]
        store = Store.connect(info["store_address"], info["store_secret"], limit)
        place = info["first_rank"], info["world_size"]
        self._group = Group(store, info["epoch"], info["backend"], *place, torch.device("cpu"), limit)

    def group(self, epoch: int) -> Group:
        self._thread.join(self._info["timeout_seconds"])
        assert self._info["epoch"] == epoch and self._group is not None, f"epoch {epoch} was not entered"
        return self._group

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


def read_tensors(paths: Sequence[str], tensors: Sequence[Sequence[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, index in `paths`) each, as in worker.UpdateInfo."""
    files = [safe_open(path, framework="pt") for path in paths]
    for name, index in tensors:
        yield name, files[index].get_tensor(name)
