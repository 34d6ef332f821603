"""Experience on the wire: what goes in comes out; what cannot be right is refused with the field's name."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fakes.data.experience import make_experience, make_group, make_task
from trinity.api.common.v1 import tensor_pb2
from trinity.data import wire
from trinity.data.experience import AttemptFailure, Experience, Group, SamplingParams, VersionSpan
from trinity.data.wire import from_tensor, to_tensor
from trinity.runtime.errors import FailureCause, InvalidInput

pytestmark = pytest.mark.core


@given(st.integers(1, 500), st.integers(0, 40), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_a_group_survives_the_wire(ordinal: int, response: int, version: int) -> None:
    group = make_group(make_task(ordinal), version, response=response)
    group.check()
    back = wire.decode_outcome(wire.encode_outcome(group))
    assert isinstance(back, Group)
    back.check()
    assert back.task == group.task
    for one, other in zip(group.experiences, back.experiences, strict=True):
        for name in ("token_ids", "logprobs", "action_mask"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype
        assert one.version_spans == other.version_spans
        assert one.reward == other.reward


def test_a_teachers_log_probabilities_survive_the_wire_and_may_be_missing() -> None:
    group = make_group(make_task(1), 0, response=6)
    experiences = tuple(
        replace(e, teacher_logprobs=-np.arange(e.response_length, dtype=np.float32)) for e in group.experiences[:1]
    )
    group = replace(group, experiences=(*experiences, *group.experiences[1:]))
    group.check()
    back = wire.decode_outcome(wire.encode_outcome(group))
    assert isinstance(back, Group)
    assert np.array_equal(back.experiences[0].teacher_logprobs, experiences[0].teacher_logprobs)  # type: ignore[arg-type]
    assert all(e.teacher_logprobs is None for e in back.experiences[1:])


def test_a_failure_survives_the_wire() -> None:
    failure = AttemptFailure(make_task(), 2, "a", FailureCause.TIMEOUT, "too slow", True, 3.0)
    assert wire.decode_outcome(wire.encode_outcome(failure)) == failure


def _changed(**changes: object) -> Experience:
    return replace(make_experience(np.random.default_rng(0), 0, 6, 3), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "experience"),
    [
        ("logprobs", _changed(logprobs=np.full(6, np.nan, np.float32))),
        ("logprobs", _changed(logprobs=np.full(6, 0.5, np.float32))),
        ("logprobs", _changed(logprobs=np.full(5, -1.0, np.float32))),
        ("action_mask", _changed(action_mask=np.ones(7, bool))),
        ("teacher_logprobs", _changed(teacher_logprobs=np.full(6, np.nan, np.float32))),
        ("teacher_logprobs", _changed(teacher_logprobs=np.full(5, -1.0, np.float32))),
        ("reward", _changed(reward=float("inf"))),
        ("reward", _changed(reward=float("nan"))),
        ("prompt_length", _changed(prompt_length=0)),
        ("prompt_length", _changed(prompt_length=1000)),
        ("token_ids", _changed(token_ids=np.full(_changed().prompt_length + 6, -1, np.int32))),
        ("version_spans", _changed(version_spans=(VersionSpan(3, 0, 5),))),
        ("version_spans", _changed(version_spans=(VersionSpan(3, 0, 6, "f" * 65),))),
        ("version_spans", _changed(version_spans=(VersionSpan(3, 0, 2), VersionSpan(2, 2, 6)))),
        ("version_spans", _changed(version_spans=(VersionSpan(3, 0, 3), VersionSpan(4, 4, 6)))),
    ],
)
def test_wrong_experience_is_refused_by_field(field: str, experience: Experience) -> None:
    with pytest.raises(InvalidInput) as refused:
        experience.check("experience")
    assert refused.value.field == f"experience.{field}"


def test_the_steps_of_a_rollout_are_bounded() -> None:
    group = make_group(make_task())
    steps = tuple(
        replace(group.experiences[0], rollout=rollout, step=step) for step in range(4096) for rollout in (0, 1)
    )
    replace(group, experiences=steps).check()
    more = replace(steps[0], step=4096)
    with pytest.raises(InvalidInput, match=r"experiences\[8192\]\.step: 4096 of rollout 0 is one more than the 4096 "):
        replace(group, experiences=(*steps, more)).check()


def sampled(*responses: list[int], logprob: float = 0.0, version: int = 1, prompt: int = 5) -> Group:
    """A group with one prompt and these responses, each token with the same log-probability."""
    experiences = tuple(
        replace(
            _changed(),
            rollout=rollout,
            token_ids=np.array([*range(prompt), *tokens], np.int32),
            prompt_length=prompt,
            logprobs=np.full(len(tokens), logprob, np.float32),
            action_mask=np.ones(len(tokens), bool),
            version_spans=(VersionSpan(version, 0, len(tokens)),),
        )
        for rollout, tokens in enumerate(responses)
    )
    return replace(make_group(make_task()), experiences=experiences)


@pytest.mark.parametrize("logprob", [0.0, -1e-5, 1e-4])
@pytest.mark.parametrize("responses", [([7, 8, 9], [7, 7]), ([4], [5]), ([1, 2], [1, 2], [1, 3], [1, 2])])
def test_two_tokens_in_one_place_are_not_both_certain(responses: tuple[list[int], ...], logprob: float) -> None:
    with pytest.raises(InvalidInput, match="both cannot be certain") as refused:
        sampled(*responses, logprob=logprob).check()
    assert refused.value.field.endswith("].logprobs")


def changed_in_one(group: Group, **changes: object) -> Group:
    return replace(group, experiences=(replace(group.experiences[0], **changes), *group.experiences[1:]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "group",
    [
        sampled([7, 8, 9], [7, 8, 9]),  # a greedy policy, or one that has collapsed
        sampled([7, 8, 9], [7, 8]),  # cut
        sampled([7, 8, 9]),
        sampled([7, 8], [6, 8], logprob=-0.7),
        changed_in_one(sampled([6, 8], [7, 8]), logprobs=np.array([-9, 0], np.float32)),
        changed_in_one(sampled([6, 8], [7, 8]), version_spans=(VersionSpan(2, 0, 2),)),
        changed_in_one(sampled([6, 8], [7, 8]), action_mask=np.array([False, True])),  # an environment's token
        changed_in_one(sampled([6, 8], [7, 8]), token_ids=np.array([9, 9, 9, 9, 9, 6, 8], np.int32)),
    ],
)
def test_certainty_of_every_token_is_no_contradiction(group: Group) -> None:
    group.check()


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.01}, {"top_k": 1}, {"top_p": 0.2}])
def test_sampling_of_one_token_makes_any_token_certain(sampling: dict[str, float]) -> None:
    group = sampled([7, 8, 9], [7, 7])
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    replace(group, task=replace(group.task, sampling=params)).check()


@pytest.mark.parametrize(
    ("field", "tensor"),
    [
        ("x.dtype", tensor_pb2.Tensor(dtype="object", shape=[1], data=b"1")),
        ("x.dtype", tensor_pb2.Tensor(dtype="float64", shape=[1], data=b"12345678")),
        ("x.shape", tensor_pb2.Tensor(dtype="float32", shape=[-1], data=b"")),
        ("x.shape", tensor_pb2.Tensor(dtype="float32", shape=[1, 1], data=b"1234")),
        ("x.data", tensor_pb2.Tensor(dtype="float32", shape=[2], data=b"1234")),
        ("x.data", tensor_pb2.Tensor(dtype="float32", shape=[2**60], data=b"1234")),
    ],
)
def test_wrong_arrays_are_refused(field: str, tensor: tensor_pb2.Tensor) -> None:
    with pytest.raises(InvalidInput) as refused:
        from_tensor(tensor, "x", "float32")
    assert refused.value.field == field


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=50))
def test_arrays_survive_the_wire(values: list[float]) -> None:
    array = np.array(values, np.float32)
    assert np.array_equal(from_tensor(to_tensor(array), "x", "float32"), array)


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_no_bytes_break_the_decoder(data: bytes) -> None:
    try:
        outcome = wire.decode_outcome(data)
    except InvalidInput:
        return
    assert outcome.task.task_id


@pytest.mark.parametrize(
    ("field", "values"),
    [("temperature", {"temperature": -1}), ("top_p", {"top_p": 0}), ("max_tokens", {"max_tokens": 0}),
     ("min_tokens", {"min_tokens": 99}), ("n", {"n": 0})],
)  # fmt: skip
def test_wrong_sampling_is_refused(field: str, values: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match=f"sampling.{field}"):
        SamplingParams(**values)  # type: ignore[arg-type]


def test_tasks_of_older_archives_call_their_requeues_life() -> None:
    task = make_task(requeues=2)
    assert wire.task_to_json(task)["requeues"] == 2
    older = {**wire.task_to_json(task), "life": 2}
    del older["requeues"]
    assert wire.task_from_json(older) == task
