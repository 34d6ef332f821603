"""A stand-in for vLLM that samples with transformers on the CPU: what it answers is what the policy really computes.

For runs in which the trainer is in question. The explorer around it is the real one (member_process.py), so tasks,
rewards, versions, canaries and log-probabilities are real as well; only speed, and vLLM's kernels, are missing.
"""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from support.fakes.explorers.member_engine import TENSOR_SECONDS, MemberEngine, read_tensors
from trinity.data.experience import SamplingParams
from trinity.data.top_tokens import TopTokens
from trinity.explorer.types import EngineOptions, Taught
from trinity.weights.lora import Lora, merged

_CPU = torch.device("cpu")


class TorchEngine(MemberEngine):
    """Samples one token a call, without a cache of keys and values: for tiny models and short responses."""

    token_seconds = 0.0

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        torch.set_num_threads(1)
        self._model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
        self._parameters = dict(self._model.named_parameters())
        self._end = self._model.config.eos_token_id

    @torch.no_grad()
    def _logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [L, V]."""
        return self._model(torch.tensor([list(tokens)])).logits[0].float()

    def _sample(self, tokens: Sequence[int], sampling: SamplingParams) -> tuple[int, float]:
        """The next token, and its log-probability at the sampling temperature."""
        assert sampling.top_p == 1 and sampling.top_k <= 0, "this engine samples from all tokens"
        logits = self._logits(tokens)[-1]
        logprobs = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
        token = int(torch.multinomial(logprobs.exp(), 1) if sampling.temperature else logits.argmax())
        return token, float(logprobs[token])

    def _ends(self, token: int, sampling: SamplingParams) -> bool:
        return token in (self._end, self.options.turn_end) and not sampling.ignore_eos

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[bytes] = ()) -> np.ndarray:
        return (await self.teach(token_ids, 1, 0)).logprobs

    async def teach(self, token_ids: Sequence[int], prompt_length: int, top: int) -> Taught:
        found = self._logits(token_ids)[prompt_length - 1 : -1].log_softmax(-1)
        reply = torch.tensor(token_ids[prompt_length:])
        values, ids = found.topk(top)
        likeliest = TopTokens(ids.int().numpy(), values.numpy()) if top else None
        return Taught(found.gather(1, reply[:, None])[:, 0].numpy(), likeliest)

    @torch.no_grad()
    def _take(self, update: dict[str, Any]) -> None:
        for name, tensor in self._whole(update):
            self._parameters[name].copy_(tensor)
            time.sleep(TENSOR_SECONDS)  # so that a test can strike in the middle

    def _whole(self, update: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's tensors; adapters are merged into the base model, as the real worker does it."""
        given = self._given(update)
        if not update.get("base_files"):
            return given
        base = read_tensors(update["base_files"], update["base_tensors"])
        return merged(base, {name: tensor.clone() for name, tensor in given}, Lora.of(update["lora"]), _CPU)


class BatchedTorchEngine(TorchEngine):
    """Samples a token for all sequences that wait at once, in a thread: fast enough for a tiny model to learn."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._waiting: list[tuple[list[int], float, asyncio.Future[tuple[int, float]]]] = []
        self._sampling: asyncio.Task[None] | None = None
        self._weights_lock = threading.Lock()

    async def _next(self, tokens: Sequence[int], sampling: SamplingParams) -> tuple[int, float]:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((list(tokens), sampling.temperature, future))
        if self._sampling is None or self._sampling.done():
            self._sampling = asyncio.create_task(self._sample_all())
        return await future

    async def _sample_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:512], self._waiting[512:]
            found = await asyncio.to_thread(self._batch, [tokens for tokens, _, _ in batch], [t for _, t, _ in batch])
            for (_, _, future), one in zip(batch, found, strict=True):
                if not future.done():
                    future.set_result(one)
            await asyncio.sleep(0)  # they ask for their next token

    @torch.no_grad()
    def _batch(self, sequences: list[list[int]], temperatures: list[float]) -> list[tuple[int, float]]:
        """The next token of each sequence, and its log-probability at its temperature."""
        lengths = [len(tokens) for tokens in sequences]
        padded = torch.tensor([tokens + [0] * (max(lengths) - len(tokens)) for tokens in sequences])
        with self._weights_lock:
            logits = self._model(padded).logits.float()
        last = logits[torch.arange(len(lengths)), torch.tensor(lengths) - 1]
        scale = torch.tensor([temperature or 1.0 for temperature in temperatures])[:, None]
        logprobs = (last / scale).log_softmax(-1)
        sampled = torch.multinomial(logprobs.exp(), 1)[:, 0]
        greedy = torch.tensor(temperatures) == 0
        tokens = torch.where(greedy, last.argmax(-1), sampled)
        return list(zip(tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist(), strict=True))

    def _take(self, update: dict[str, Any]) -> None:
        with self._weights_lock:
            super()._take(update)


class ComputesSomethingElse(TorchEngine):
    """Its log-probabilities are half a thousandth of a nat too low: in float32 canaries allow twice that by default."""

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[bytes] = ()) -> np.ndarray:
        return await super().logprobs(token_ids, images) - np.float32(5e-4)
