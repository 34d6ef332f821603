"""Parsing of replies: the strict and the lenient form, and bounded time on anything a policy may write."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.environments.replies import ReplyFormat, parse, write

pytestmark = pytest.mark.core

FORMS = list(ReplyFormat)


def test_a_strict_reply_is_one_thought_then_one_action() -> None:
    reply = parse("<think>a box is left</think>\n<action> push  it\n</action>", "strict")
    assert (reply.action, reply.thought, reply.problem) == ("push it", "a box is left", "")


@pytest.mark.parametrize(
    "text",
    [
        "up",
        "<action>up</action>",
        "<think>hm</think>",
        "<action>up</action><think>hm</think>",
        "<think>hm</think><action>up</action><action>down</action>",
        "<think>hm</think><think>hm</think><action>up</action>",
        "<think>hm<action>up</action></think>",
        "<think>hm</think><action>up",
        "<think>hm</think></action>up<action>",
        "<think>hm</think><action> \n </action>",
        "<THINK>hm</THINK><action>up</action>",
    ],
)
def test_everything_else_is_no_strict_reply(text: str) -> None:
    reply = parse(text, "strict")
    assert reply.problem
    assert not reply.action


@pytest.mark.parametrize("text", ["up", "<think>left</think>\n\nup", "left</think>up\n"])
def test_a_plain_reply_is_its_action_behind_the_thoughts(text: str) -> None:
    assert parse(text, "plain").action == "up"


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<action>up</action><action>down</action>", "down"),
        ("I go <action>up</action> now", "up"),
        ("<think>```left```</think> so ```\nup\n```", "up"),
        ('{"thoughts": "hm", "action": "up"}', "up"),
        ('<think>"action": "left"</think>{"action" : "up"}', "up"),
        ("up", "up"),
        ("<think>hm</think>up", "up"),
        ("<think>I could say <action>down</action></think><action>up</action>", "up"),
        ("<action>down</action> or <action>up", "down"),
    ],
)
def test_a_lenient_reply_may_name_its_action_in_other_ways(text: str, action: str) -> None:
    assert parse(text, "lenient").action == action


@pytest.mark.parametrize("text", ["", "two\nlines", "<think>only a thought</think>", "<action>", "a" * 300])
def test_a_lenient_reply_still_has_to_name_one(text: str) -> None:
    assert "there is no <action>" in parse(text, "lenient").problem


def test_another_tag_may_mark_the_answer() -> None:
    assert parse("<think>hm</think><answer>42</answer>", "strict", "answer").action == "42"
    assert parse("<think>hm</think><action>42</action>", "strict", "answer").problem


def test_an_overlong_reply_is_a_problem_in_every_form() -> None:
    for form in FORMS:
        assert "101 characters, at most 100" in parse("x" * 101, form, max_characters=100).problem


def test_control_characters_are_no_part_of_an_action() -> None:
    assert parse("<action>go\x00\x1b \u202eup</action>", "lenient").action == "go up"
    assert parse("<action>\x00</action>", "lenient").problem


@given(st.text(max_size=200))
def test_what_is_written_is_read_back(action: str) -> None:
    clean = " ".join("".join(c if c.isprintable() else " " for c in action).split())
    if clean and "<" not in clean:
        for form in ("strict", "lenient"):
            assert parse(write(action), form).action == clean


@pytest.mark.parametrize("form", FORMS)
@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<action>", "</action>", "```", '"action": "', "up", "\x00", "٣", "\n"])
    )
)
@settings(deadline=None)
def test_any_reply_has_either_an_action_or_a_problem(form: str, parts: list[str]) -> None:
    reply = parse("".join(parts), form)
    assert bool(reply.action) != bool(reply.problem)
    assert reply.action.isprintable()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("unit", ["<action>", "</action>", "<think>", "```", '"action": "', "<action></action>", "9**"])
def test_ten_megabytes_take_bounded_time(form: str, unit: str) -> None:
    begin = time.process_time()
    parse(unit * (10_000_000 // len(unit)), form, max_characters=20_000_000)
    assert time.process_time() - begin < 2
