"""The log checks every field that the trainer reads."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fakes.data.experience import make_group, make_task
from trinity.api.buffer.v1.buffer_pb2 import LedgerCursor
from trinity.api.common.v1 import experience_pb2
from trinity.buffer.ledger.wire import cursor_of
from trinity.buffer.log.reader import MOST_FENCED, check_fence
from trinity.buffer.log.wire import LogEntry
from trinity.buffer.window.groups import CUT
from trinity.buffer.window.policy import Policy
from trinity.buffer.window.window import Verdict, Window
from trinity.data.experience import Limits
from trinity.data.wire import encode_outcome, fill_group, fill_tensor
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

LIMITS = Limits(tokens=40, vocabulary=100, reward=1e6, logprob=1e4)
FIRST = "group.experiences[0]"

Change = Callable[[experience_pb2.Group], Any]


def sound() -> experience_pb2.Group:
    return experience_pb2.Outcome.FromString(encode_outcome(make_group(make_task(), response=12))).group


def entry_of(group: experience_pb2.Group) -> LogEntry:
    return LogEntry.parse(experience_pb2.Outcome(group=group).SerializeToString())


def put(field: str, value: Any) -> Change:
    """Sets a field of the group, or one of its first experience after `e.`."""

    def change(group: experience_pb2.Group) -> None:
        holder: Any = group
        *path, name = field.split(".")
        for part in path:
            holder = group.experiences[0] if part == "e" else getattr(holder, part)
        if isinstance(value, list):
            del getattr(holder, name)[:]
            getattr(holder, name).extend(value)
        else:
            setattr(holder, name, value)

    return change


def token(value: int) -> Change:
    def change(group: experience_pb2.Group) -> None:
        ids = group.experiences[0].token_ids
        array = np.frombuffer(ids.data, np.int32).copy()
        array[-1] = value
        ids.data = array.tobytes()

    return change


def logprob(value: float, field: str = "logprobs") -> Change:
    def change(group: experience_pb2.Group) -> None:
        first = group.experiences[0]
        tensor = getattr(first, field)
        tensor.CopyFrom(first.logprobs)
        array = np.frombuffer(tensor.data, np.float32).copy()
        array[3] = value
        tensor.data = array.tobytes()

    return change


def longer(group: experience_pb2.Group) -> None:
    task = make_task()
    group.CopyFrom(experience_pb2.Outcome.FromString(encode_outcome(make_group(task, response=60))).group)


def doubled(group: experience_pb2.Group) -> None:
    group.experiences.add().CopyFrom(group.experiences[0])


def as_float64(group: experience_pb2.Group) -> None:
    logprob(-1.0, "teacher_logprobs")(group)
    teacher = group.experiences[0].teacher_logprobs
    teacher.dtype, teacher.data = "float64", np.full(12, -1.0).tobytes()


WRONG: list[tuple[str, Change]] = [
    ("group.attempt", put("attempt", 0)),
    ("group.explorer_id", put("explorer_id", "")),
    ("group.explorer_id", put("explorer_id", "x" * 300)),
    ("group.started_at_seconds", put("started_at_seconds", float("nan"))),
    ("group.finished_at_seconds", put("finished_at_seconds", 1e300)),
    ("group.experiences[0].rollout", put("e.rollout", 32)),
    (f"{FIRST}.rollout", put("e.rollout", -1)),
    (f"{FIRST}.step", put("e.step", -1)),
    ("group.experiences[4].step", doubled),
    (f"{FIRST}.token_ids", longer),
    (f"{FIRST}.token_ids", token(100)),
    (f"{FIRST}.token_ids", token(2**31 - 1)),
    (f"{FIRST}.token_ids", token(-1)),
    (f"{FIRST}.token_ids.dtype", put("e.token_ids.dtype", "int64")),
    (f"{FIRST}.token_ids.shape", put("e.token_ids.shape", [1, 13])),
    (f"{FIRST}.token_ids.data", put("e.token_ids.shape", [2**60])),
    (f"{FIRST}.prompt_length", put("e.prompt_length", 0)),
    (f"{FIRST}.logprobs", logprob(float("nan"))),
    (f"{FIRST}.logprobs", logprob(float("-inf"))),
    (f"{FIRST}.logprobs", logprob(0.5)),
    (f"{FIRST}.logprobs.dtype", put("e.logprobs.dtype", "float16")),
    (f"{FIRST}.action_mask.dtype", put("e.action_mask.dtype", "int32")),
    (f"{FIRST}.action_mask.data", put("e.action_mask.data", b"\1")),
    (f"{FIRST}.action_mask.data", put("e.action_mask.data", b"\2\xff" * 6)),
    (f"{FIRST}.teacher_logprobs", logprob(float("nan"), "teacher_logprobs")),
    (f"{FIRST}.teacher_logprobs.dtype", as_float64),
    (f"{FIRST}.reward", put("e.reward", float("nan"))),
    (f"{FIRST}.reward", put("e.reward", 1e300)),
    (f"{FIRST}.reward", put("e.reward", 3e38)),
    (f"{FIRST}.reward", put("e.reward", -1.1e6)),
    (f"{FIRST}.logprobs", logprob(-1e30)),
    (f"{FIRST}.teacher_logprobs", logprob(-1.1e4, "teacher_logprobs")),
    (f"{FIRST}.metrics['m']", lambda group: group.experiences[0].metrics.update(m=float("inf"))),
    (f"{FIRST}.metrics['m']", lambda group: group.experiences[0].metrics.update(m=float("nan"))),
    (f"{FIRST}.info_json", put("e.info_json", "not json")),
    (f"{FIRST}.info_json", put("e.info_json", "[1]")),
    (f"{FIRST}.info_json", put("e.info_json", "[" * 100_000)),
    (f"{FIRST}.info_json", put("e.info_json", '{"moved": ' + "[" * 500 + "]" * 500 + "}")),
    (f"{FIRST}.metrics", lambda group: group.experiences[0].metrics.update({str(n): 1.0 for n in range(1001)})),
    (f"{FIRST}.metrics", lambda group: group.experiences[0].metrics.update({"m" * 257: 1.0})),
    (f"{FIRST}.truncation", put("e.truncation", 9)),
    (f"{FIRST}.version_spans", lambda group: group.experiences[0].version_spans.add(version=0, start=12, end=14)),
    (f"{FIRST}.version_spans", lambda group: group.experiences[0].version_spans.pop()),
    ("group.experiences", lambda group: group.ClearField("experiences")),
    ("task.repeat_times", put("task.repeat_times", 0)),
    ("task.timeout_seconds", put("task.timeout_seconds", float("inf"))),
]  # fmt: skip


@pytest.mark.parametrize(("field", "change"), WRONG, ids=[f"{i}-{field}" for i, (field, _) in enumerate(WRONG)])
def test_what_the_trainer_could_not_use_is_refused_by_field(field: str, change: Change) -> None:
    group = sound()
    entry_of(group).summary(1, LIMITS)
    change(group)
    with pytest.raises(InvalidInput) as refused:
        entry_of(group).summary(1, LIMITS)
    assert refused.value.field == field


def test_two_rollouts_that_are_certain_of_different_tokens_in_one_place_are_refused() -> None:
    group = sound()
    for value, other in zip((11, 12), (group.experiences[0], group.experiences[1]), strict=True):
        sampled = len(other.action_mask.data)
        other.prompt_length, other.token_ids.shape[:] = 1, [1 + sampled]
        other.token_ids.data = np.array([5, *[value] * sampled], np.int32).tobytes()
        other.logprobs.data = np.full(sampled, -0.7, np.float32).tobytes()
    entry_of(group).summary(1, LIMITS)
    for other in group.experiences[:2]:
        other.logprobs.data = bytes(len(other.logprobs.data))
    with pytest.raises(InvalidInput, match="both cannot be certain"):
        entry_of(group).summary(1, LIMITS)


def test_ids_that_no_model_has_are_refused_where_the_vocabulary_is_not_known() -> None:
    group = sound()
    token(200_000)(group)
    entry_of(group).summary(1)
    token(2**31 - 1)(group)
    with pytest.raises(InvalidInput, match="ids of any model are below 16777216"):
        entry_of(group).summary(1)


@pytest.mark.parametrize("field", ["token_ids", "logprobs", "action_mask", "teacher_logprobs"])
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_an_array_of_any_type_shape_and_length_is_taken_or_refused_by_field(field: str, data: st.DataObject) -> None:
    group = sound()
    tensor = getattr(group.experiences[0], field)
    if field == "teacher_logprobs":
        tensor.CopyFrom(group.experiences[0].logprobs)
    tensor.dtype = data.draw(st.sampled_from(["int32", "int64", "float32", "float64", "bool", "object", ""]))
    del tensor.shape[:]
    tensor.shape.extend(data.draw(st.lists(st.sampled_from([-1, 0, 12, 13, 2**40]), max_size=2)))
    tensor.data = data.draw(st.one_of(st.just(tensor.data), st.binary(max_size=80)))
    take(group)


_NUMBERS = st.one_of(st.integers(-3, 20), st.sampled_from([2**31 - 1, -(2**31)]))
_FLOATS = st.one_of(st.floats(), st.sampled_from([0.0, 1.0, 1e300]))
_TEXTS = st.sampled_from(["", "{}", "[]", "null", '{"a": 1}', "{", '{"a": NaN}'])
_MUTATIONS = st.one_of(
    st.builds(put, st.sampled_from(["e.rollout", "e.step", "e.prompt_length", "e.truncation"]), _NUMBERS),
    st.builds(put, st.just("e.reward"), _FLOATS),
    st.builds(put, st.just("e.info_json"), _TEXTS),
    st.builds(token, st.integers(-5, 120)),
    st.builds(logprob, st.floats(width=32), st.sampled_from(["logprobs", "teacher_logprobs"])),
    st.builds(lambda value: lambda g: g.experiences[0].metrics.update(m=value), _FLOATS),
    st.builds(
        lambda v, s, e: lambda g: g.experiences[0].version_spans.add(version=v, start=s, end=e),
        st.integers(-1, 3), st.integers(-1, 14), st.integers(-1, 14),
    ),
    st.just(doubled),
)  # fmt: skip


@given(st.lists(_MUTATIONS, min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_random_changes_of_a_sound_group_are_taken_or_refused_by_field(changes: list[Change]) -> None:
    group = sound()
    for change in changes:
        change(group)
    take(group)


def take(group: experience_pb2.Group) -> None:
    """Takes a group only with whole arrays of the right types; any error but a refusal ends the test."""
    with contextlib.suppress(InvalidInput):
        entry_of(group).summary(1, LIMITS)
        for one in group.experiences:
            assert len(one.token_ids.data) == 4 * sum(one.token_ids.shape)
            assert (one.token_ids.dtype, one.logprobs.dtype, one.action_mask.dtype) == ("int32", "float32", "bool")
            assert len(one.logprobs.data) == 4 * len(one.action_mask.data) == 4 * sum(one.logprobs.shape)


@pytest.mark.parametrize("value", ['"x"', "[1]", "{}", "NaN", "1e400", "9" * 400])
def test_what_the_advantage_calculates_with_is_a_number(value: str) -> None:
    group, limits = sound(), replace(LIMITS, numbers=("step_reward",))
    put("e.info_json", f'{{"step_reward": {value}}}')(group)
    with pytest.raises(InvalidInput, match=r"experiences\[0\]\.info_json: has .* for 'step_reward', must be a finite"):
        entry_of(group).summary(1, limits)
    entry_of(group).summary(1, LIMITS)
    for good in ("null", "true", "-2.5", "3"):
        put("e.info_json", f'{{"step_reward": {good}}}')(group)
        entry_of(group).summary(1, limits)


def test_what_an_advantage_compares_with_a_teacher_has_one() -> None:
    group, limits = sound(), replace(LIMITS, teacher=True)
    with pytest.raises(InvalidInput, match=r"experiences\[0\]\.teacher_logprobs: is missing"):
        entry_of(group).summary(1, limits)
    for experience in group.experiences:
        experience.teacher_logprobs.CopyFrom(experience.logprobs)
    group.experiences[1].ClearField("teacher_logprobs")  # a prompt that was cut: nothing of it is trained
    group.experiences[1].action_mask.data = bytes(12)
    assert entry_of(group).summary(1, limits).num_experiences == 4


def test_a_sound_group_with_a_teacher_is_taken() -> None:
    group = sound()
    logprob(-0.5, "teacher_logprobs")(group)
    assert entry_of(group).summary(1, LIMITS).num_experiences == 4


def test_a_teachers_likeliest_tokens_are_read_where_the_loss_reads_them_and_checked_wherever_they_are() -> None:
    group = sound()
    with pytest.raises(InvalidInput, match=r"experiences\[0\]\.teacher_top: has 0 tokens"):
        entry_of(group).summary(1, replace(LIMITS, teacher_top=1))
    for experience in group.experiences:
        fill_tensor(experience.teacher_top.ids, np.full((12, 1), 99, np.int32))
        fill_tensor(experience.teacher_top.logprobs, np.full((12, 1), -0.5, np.float32))
    assert entry_of(group).summary(1, replace(LIMITS, teacher_top=1)).num_experiences == 4
    put("e.teacher_top.ids.data", np.full(12, 100, np.int32).tobytes())(group)
    with pytest.raises(InvalidInput, match=r"experiences\[0\]\.teacher_top\.ids: has 100 to 100; ids are below 100"):
        entry_of(group).summary(1, LIMITS)


def test_tokens_that_the_policy_did_not_sample_are_not_counted_as_generated() -> None:
    group = make_group(make_task(), response=12)
    observed = np.arange(12) % 3 > 0  # 8 of 12
    experiences = tuple(replace(e, action_mask=observed) for e in group.experiences)
    group, message = replace(group, experiences=experiences), experience_pb2.Group()
    fill_group(message, group)
    stored = entry_of(message).summary(1)
    assert (stored.num_response_tokens, stored.num_sampled_tokens) == (48, 32)
    assert (group.response_tokens, group.sampled_tokens) == (48, 32)
    window = Window(Policy(1))
    window.group(stored)
    assert window.sampled_tokens == 32


def test_a_late_group_of_a_cut_task_may_say_anything_and_is_counted_by_what_it_has() -> None:
    """It is not checked, and the next ledger entry has its tokens: their number, and no text of it."""
    window, group = Window(Policy(2, fewest_groups=1)), sound()
    window.group(replace(entry_of(group).unchecked_summary(1), ordinal=2))
    window.short_batch(fed=2)
    for experience in group.experiences:
        experience.token_ids.shape[:] = [2**62, 2**62]
        experience.prompt_length = -(2**31)
        experience.reward = float("nan")
    group.task.task_id = "x" * 9_000_000
    assert window.group(entry_of(group).unchecked_summary(2)) is Verdict.LATE
    (drop,) = LedgerCursor.FromString(cursor_of(window)).fresh_drops
    assert (drop.reason, drop.num_response_tokens, drop.task_id) == (CUT, 48, "")


@pytest.mark.parametrize("versions", [[0], [-1], range(1, MOST_FENCED + 2)])
def test_fences_are_bounded(versions: list[int]) -> None:
    with pytest.raises(InvalidInput, match="versions"):
        check_fence(versions)
    check_fence(range(1, MOST_FENCED + 1))


def test_episodes_that_moved_are_counted() -> None:
    group = sound()
    texts = {'{"moved": [{"turn": 1, "from": "a", "to": "b"}]}': 1, '{"moved": []}': 0, '{"moved"': 0, '["moved"]': 0}
    for text, count in texts.items():
        group.experiences[0].info_json = text
        assert entry_of(group).unchecked_summary(1).moved_episodes == count
    window = Window(Policy(1))
    window.group(replace(entry_of(group).unchecked_summary(1), moved_episodes=2))
    assert window.moved_episodes == 2
