"""A teacher's likeliest tokens travel in the log at 8 bytes each, and are checked at its border."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.fakes.data.experience import make_group, make_task
from trinity.api.common.v1 import experience_pb2
from trinity.data.experience import UNLIMITED, Group, Limits
from trinity.data.top_tokens import TopTokens
from trinity.data.wire import decode_outcome, encode_outcome
from trinity.plugins.arguments import MOST_TOP_TOKENS
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

LIMITS = replace(UNLIMITED, vocabulary=1000, logprob=1e4)


def top_of(places: int, k: int, seed: int = 0, vocabulary: int = 300) -> TopTokens:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (places, vocabulary))
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ids = np.argsort(-logs, axis=1)[:, :k].astype(np.int32)
    return TopTokens(ids, np.take_along_axis(logs, ids, 1).astype(np.float32))


def taught(k: int = 4) -> Group:
    group = make_group(make_task(3))
    made = (replace(e, teacher_top=top_of(e.response_length, k, e.rollout)) for e in group.experiences)
    return replace(group, experiences=tuple(made))


@pytest.mark.parametrize("k", [1, 64])
def test_they_return_from_the_log_as_they_were_and_take_eight_bytes_each(k: int) -> None:
    group, plain = taught(k), make_group(make_task(3))
    data = encode_outcome(group)
    found = decode_outcome(data)
    assert isinstance(found, Group)
    found.check(replace(LIMITS, teacher_top=k))
    for one, other in zip(found.experiences, group.experiences, strict=True):
        assert one.teacher_top is not None and other.teacher_top is not None
        assert np.array_equal(one.teacher_top.ids, other.teacher_top.ids)
        assert np.array_equal(one.teacher_top.logprobs, other.teacher_top.logprobs)
    added = len(data) - len(encode_outcome(plain)) - 8 * k * group.response_tokens
    assert 0 < added < 60 * len(group.experiences), "what is left is dtypes and shapes"


def test_an_experience_without_them_stays_so() -> None:
    found = decode_outcome(encode_outcome(make_group(make_task(4))))
    assert isinstance(found, Group)
    assert all(one.teacher_top is None for one in found.experiences)


def altered(name: str, row: int, values: list[float]) -> Any:
    def change(top: TopTokens) -> TopTokens:
        array = getattr(top, name).copy()
        array[row] = values
        return replace(top, **{name: array})

    return change


WRONG: dict[str, tuple[Any, str]] = {
    "another response": (lambda top: TopTokens(top.ids[1:], top.logprobs[1:]), ""),
    "shapes that differ": (lambda top: replace(top, logprobs=top.logprobs[:, 1:]), ""),
    "no token": (lambda top: TopTokens(top.ids[:, :0], top.logprobs[:, :0]), ".ids"),
    "too many": (lambda top: top_of(len(top.ids), MOST_TOP_TOKENS + 1), ".ids"),
    "an id of no token": (altered("ids", 1, [1, 2, 3, 1000]), ".ids"),
    "a negative id": (altered("ids", 1, [1, 2, 3, -1]), ".ids"),
    "a token twice": (altered("ids", 1, [1, 2, 3, 1]), ".ids"),
    "NaN": (altered("logprobs", 1, [-1, -2, -3, np.nan]), ".logprobs"),
    "minus infinity": (altered("logprobs", 1, [-1, -2, -3, -np.inf]), ".logprobs"),
    "above 0": (altered("logprobs", 1, [0.5, -2, -3, -4]), ".logprobs"),
    "below the bound": (altered("logprobs", 1, [-1, -2, -3, -2e4]), ".logprobs"),
    "another order": (altered("logprobs", 1, [-2, -1, -3, -4]), ".logprobs"),
    "more than certain": (altered("logprobs", 1, [-0.5, -0.6, -3, -4]), ".logprobs"),
}


@pytest.mark.parametrize("what", WRONG)
def test_malformed_ones_are_refused(what: str) -> None:
    change, field = WRONG[what]
    first, *others = taught().experiences
    with pytest.raises(InvalidInput) as refused:
        replace(taught(), experiences=(replace(first, teacher_top=change(first.teacher_top)), *others)).check(LIMITS)
    assert refused.value.field == f"group.experiences[0].teacher_top{field}"


@pytest.mark.parametrize(("name", "dtype"), [("ids", "int64"), ("logprobs", "float64")])
def test_arrays_of_another_type_or_rank_are_refused(name: str, dtype: str) -> None:
    for change in ({"dtype": dtype}, {"shape": [1]}):
        message = experience_pb2.Outcome.FromString(encode_outcome(taught()))
        tensor = getattr(message.group.experiences[0].teacher_top, name)
        tensor.dtype = change.get("dtype", tensor.dtype)
        tensor.shape[:] = change.get("shape", list(tensor.shape))
        with pytest.raises(InvalidInput, match=rf"experiences\[0\]\.teacher_top\.{name}"):
            decode_outcome(message.SerializeToString())


def test_a_loss_gets_as_many_as_it_reads() -> None:
    taught(4).check(Limits(teacher_top=4))
    with pytest.raises(InvalidInput, match=r"teacher_top: has 4 tokens for each place; the run's loss reads 5"):
        taught(4).check(Limits(teacher_top=5))
    group = make_group(make_task(3))
    with pytest.raises(InvalidInput, match="teacher_top: has 0 tokens"):
        group.check(Limits(teacher_top=1))
    cut = tuple(replace(e, action_mask=np.zeros_like(e.action_mask)) for e in group.experiences)
    replace(group, experiences=cut).check(Limits(teacher_top=1))  # a prompt that was cut: nothing of it is trained
