"""Parsers of replies of policies and judges: no text breaks them, and time is linear in its length."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.compat_rft import judges, reflection
from trinity.config.workflows import ActionForm
from trinity.explorer.workflows.player import parse_action
from trinity.explorer.workflows.tool_calls import Call, read_calls

pytestmark = pytest.mark.core

MARKS = (
    *("<think>", "</think>", "<action>", "</action>", "<answer>", "</answer>", "```", "<tool_call>", "</tool_call>"),
    *("{", "}", "[", "]", '"', "\\", ",", ":", "0", "1", "-", "e", "9" * 5000, "NaN", "Infinity", "null", "\ud800"),
    *('"name"', '"arguments"', '"trajectory_outcome"', '"retry_from_step"', "\x00", "\u202e", "\n", " "),
)
pieces = st.lists(st.sampled_from(MARKS) | st.text(max_size=20), max_size=60).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
REPORT = ("trajectory_summary", "root_cause_analysis", "trajectory_outcome", "improvement_suggestion")
reports = st.fixed_dictionaries(
    {},
    optional={
        **{name: json_values | st.sampled_from([*reflection.Outcome, "advice"]) for name in REPORT},
        "retry_from_step": json_values | st.integers(-1, 5),
    },
)
calls = st.fixed_dictionaries({}, optional={"name": json_values, "arguments": json_values})


@settings(deadline=None)
@given(pieces, st.sampled_from(ActionForm), st.booleans())
def test_a_reply_has_an_action_or_a_problem(reply: str, form: ActionForm, thinking: bool) -> None:
    parsed = parse_action(reply, form, thinking)
    if form is ActionForm.REPLY:
        assert parsed.action == reply
    else:
        assert bool(parsed.action) != bool(parsed.problem)
        assert parsed.action in reply
        assert len(parsed.action) <= 2000


@settings(deadline=None)
@given(pieces | calls.map(lambda value: f"<tool_call>{json.dumps(value)}</tool_call>"))
def test_a_reply_has_calls_each_of_which_can_be_made_or_has_a_problem(reply: str) -> None:
    found = read_calls(reply)
    assert len(found) <= min(8, reply.count("<tool_call>"))
    for call in found:
        assert isinstance(call, Call)
        assert call.problem or (isinstance(call.name, str) and isinstance(call.arguments, dict))


@settings(deadline=None)
@given(pieces | reports.map(json.dumps) | json_values.map(json.dumps), st.integers(0, 5))
def test_a_report_can_be_used_or_is_none(reply: str, steps: int) -> None:
    report = reflection.read(reply, steps)
    if report is not None:
        assert 0 <= report.retry_from_step < steps
        assert all(text.strip() for text in (report.summary, report.cause, report.suggestion))
        assert len(report.guidance) < 10_000


@settings(deadline=None)
@given(pieces | st.lists(json_values, max_size=5).map(json.dumps), st.integers(0, 5))
def test_a_judge_gives_as_many_numbers_as_asked_or_none(reply: str, count: int) -> None:
    found = judges.read_numbers(reply, count)
    if found is not None:
        assert len(found) == count
        assert all(type(number) is float and 0 <= number <= 1 for number in found)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), pieces.filter(lambda text: "]" not in text))
def test_the_numbers_of_a_judge_are_found_behind_any_text(numbers: list[float], said: str) -> None:
    assert judges.read_numbers(f"{said}{json.dumps(numbers)}", len(numbers)) == numbers


LONG = 10_000_000
READERS: dict[str, Callable[[str], Any]] = {
    **{f"action_{form}": lambda reply, form=form: parse_action(reply, form, True) for form in ActionForm},  # type: ignore[misc]
    "calls": read_calls,
    "report": lambda reply: reflection.read(reply, 5),
    "numbers": lambda reply: judges.read_numbers(reply, 5),
}
LONG_REPLIES = {
    "nothing": ("", "x", ""),
    "open_tags": ("", "<action>", ""),
    "closed_tags": ("", "</action>", ""),
    "fences": ("", "```", ""),
    "open_calls": ("", "<tool_call>", ""),
    "empty_calls": ("", "<tool_call></tool_call>", ""),
    "one_long_call": ('<tool_call>{"name": "', "x", '"}</tool_call>'),
    "nested_calls": ("<tool_call>", '{"name":', "</tool_call>"),
    "braces": ("{", "{", "}"),
    "objects": ("", "{}", ""),
    "nested_objects": ("", '{"a":', "}"),
    "nested_lists": ("", "[", "]"),
    "one_long_list": ("[0", ",0", "]"),
    "one_long_number": ("[", "9", "]"),
    "one_long_text": ('{"trajectory_summary": "', "\\\\", '"}'),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("reply", LONG_REPLIES)
def test_ten_megabytes_are_read_within_seconds(reader: str, reply: str) -> None:
    head, part, tail = LONG_REPLIES[reply]
    text = head + part * (LONG // len(part)) + tail
    begin = time.process_time()
    READERS[reader](text)
    assert time.process_time() - begin < 10
