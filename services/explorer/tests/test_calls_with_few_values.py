"""Generate and Chat take a request that names only what differs from the usual."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trinity.api.explorer.v1 import explorer_pb2 as pb
from trinity.data.experience import Limits, SamplingParams, VersionSpan
from trinity.explorer.servicer import ExplorerServicer
from trinity.explorer.types import Completion
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core


class Pool:
    def __init__(self) -> None:
        self.asked: list[SamplingParams] = []

    async def generate(self, prompt: list[int], sampling: SamplingParams, images: Any = ()) -> list[Completion]:
        self.asked.append(sampling)
        tokens = np.array([5, 6], np.int32)
        return [Completion(tokens, np.zeros(2, np.float32), (VersionSpan(0, 0, 2),), "stop")] * sampling.n


@pytest.fixture
def pool() -> Pool:
    return Pool()


def servicer(pool: Pool) -> ExplorerServicer:
    tokenizer = SimpleNamespace(prompt=lambda messages: [1, 2], text=lambda tokens: "4", reply=lambda tokens: "4")
    service: Any = SimpleNamespace(pool=pool, tokenizer=tokenizer, limits=Limits(64, 100))
    return ExplorerServicer(service)


def chat(**sampling: Any) -> pb.ChatRequest:
    request = pb.ChatRequest(messages_json='[{"role": "user", "content": "2 + 2?"}]')
    for name, value in sampling.items():
        setattr(request.sampling, name, value)
    return request


async def test_what_is_left_out_is_one(pool: Pool) -> None:
    context: Any = None
    answer = await servicer(pool).Chat(chat(max_tokens=8, temperature=0.5), context)
    assert [completion.text for completion in answer.completions] == ["4"]
    await servicer(pool).Generate(
        pb.GenerateRequest(prompt_token_ids=[1], sampling=chat(max_tokens=8).sampling), context
    )
    for asked, temperature in zip(pool.asked, (0.5, 0.0), strict=True):
        assert asked == SamplingParams(temperature=temperature, top_p=1.0, top_k=0, max_tokens=8, n=1)


async def test_what_is_given_counts(pool: Pool) -> None:
    context: Any = None
    await servicer(pool).Chat(chat(max_tokens=8, top_p=0.5, n=3, repetition_penalty=1.5), context)
    assert (pool.asked[0].top_p, pool.asked[0].n, pool.asked[0].repetition_penalty) == (0.5, 3, 1.5)
    with pytest.raises(InvalidInput, match=r"sampling\.top_p: is -0\.5"):
        await servicer(pool).Chat(chat(max_tokens=8, top_p=-0.5), context)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("n", 2**31 - 1, r"must be in \[1, 65536\]"),  # a list of as many completions would take all memory
        ("temperature", float("inf"), "must be >= 0 and finite"),
        ("repetition_penalty", float("inf"), "must be > 0 and finite"),  # the engine's log-probabilities would be NaN
        ("repetition_penalty", float("nan"), "must be > 0 and finite"),
    ],
)
async def test_numbers_that_no_engine_can_take_are_refused(pool: Pool, field: str, value: float, rule: str) -> None:
    context: Any = None
    with pytest.raises(InvalidInput, match=rf"sampling\.{field}: is .*, {rule}"):
        await servicer(pool).Chat(chat(**{"max_tokens": 8, field: value}), context)
    assert not pool.asked
