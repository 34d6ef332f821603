"""Rewards of stored groups by another function: what it is given, what is refused, and what its rewards change."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from support.fakes.data.experience import make_group, make_task
from trinity.data.experience import Group, Truncation
from trinity.data.wire import decode_outcome, encode_outcome
from trinity.lineage.rewards import Changes, LeftOut, NotRecorded, rescored
from trinity.lineage.wire import regraded
from trinity.reading.errors import RunError

pytestmark = pytest.mark.core

FORMAT = json.dumps({"response_key": "answer"})


def recorded(rewards: Sequence[float], ordinal: int = 1, version: int = 3, **task: Any) -> Group:
    made = make_group(make_task(ordinal, repeat_times=len(rewards), format_json=FORMAT, **task), version)
    experiences = tuple(
        replace(one, reward=reward, prompt_text="1+1", response_text=f"reply {index}")
        for index, (one, reward) in enumerate(zip(made.experiences, rewards, strict=True))
    )
    return replace(made, experiences=experiences)


def scored(group: Group, answers: Any, function: str = "exact") -> tuple[list[float], list[dict[str, Any]]]:
    """Rewards by `answers(item)`, and the items that the function got."""
    given: list[dict[str, Any]] = []

    async def score(items: Sequence[dict[str, Any]]) -> list[tuple[float, dict[str, float]]]:
        given.extend(items)
        return [(answers(item), {}) for item in items]

    return [reward for reward, _ in asyncio.run(rescored(group, function, score))], given


def test_the_function_gets_what_a_run_gives_it() -> None:
    group = recorded([0.0, 1.0, 0.5])
    cut = replace(group.experiences[1], truncation=Truncation.RESPONSE)
    group = replace(group, experiences=(group.experiences[0], cut, group.experiences[2]))
    rewards, given = scored(group, lambda item: float(item["response"][-1]))
    assert rewards == [0.0, 1.0, 2.0]
    first = group.experiences[0]
    assert given[0] == {
        "prompt": "1+1", "response": "reply 0", "truth": "#### 2", "task_json": group.task.row_json, "truncated": False,
        "response_tokens": 12, "response_token_ids": first.token_ids[first.prompt_length :].tolist(),
    }  # fmt: skip
    assert [item["truncated"] for item in given] == [False, True, False]


def test_of_several_right_answers_the_best_counts() -> None:
    row = json.dumps({"question": "1+1", "answer": ["2", "two", "ii"]})
    rewards, given = scored(
        recorded([0.0, 0.0], row_json=row), lambda item: {"2": 0.25, "two": 0.75}.get(item["truth"], 0)
    )
    assert rewards == [0.75, 0.75]
    assert len(given) == 6


def test_several_tests_are_one_reference() -> None:
    row = json.dumps({"question": "1+1", "answer": ["assert f(1)", "assert f(2)"]})
    _, given = scored(recorded([0.0], row_json=row), lambda item: 0.0, "code_tests")
    assert [json.loads(item["truth"]) for item in given] == [["assert f(1)", "assert f(2)"]]


def test_a_rollout_whose_prompt_was_cut_stays() -> None:
    group = recorded([0.25, 0.0])
    cut = replace(group.experiences[0], truncation=Truncation.PROMPT)
    rewards, given = scored(replace(group, experiences=(cut, group.experiences[1])), lambda item: 9.0)
    assert (rewards, len(given)) == ([0.25, 9.0], 1)


def _turns(group: Group) -> Group:
    second = replace(group.experiences[1], rollout=0, step=1)
    return replace(group, experiences=(group.experiences[0], second, *group.experiences[2:]))


def _preliminary(group: Group) -> Group:
    first = replace(group.experiences[0], info_json='{"group": "reflect_0"}')
    return replace(group, experiences=(first, *group.experiences[1:]))


def _without_texts(group: Group) -> Group:
    return replace(group, experiences=tuple(replace(one, prompt_text="") for one in group.experiences))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_turns, "stores a rollout as several experiences"),
        (_preliminary, "stores a rollout as several experiences"),
        (_without_texts, "simple_workflow recorded no texts"),
    ],
)
def test_what_was_not_recorded_is_named(change: Any, said: str) -> None:
    with pytest.raises(NotRecorded, match=rf"task sums/0/1: .*{said}"):
        scored(change(recorded([0.0, 1.0, 0.0])), lambda item: 1.0)


def test_a_reference_answer_that_is_none_is_named() -> None:
    row = json.dumps({"question": "1+1", "answer": {"value": 2}})
    with pytest.raises(RunError, match=r"task sums/0/1: its reference answer, column answer, .*must be text"):
        scored(recorded([0.0, 1.0], row_json=row), lambda item: 1.0)


def test_the_stored_group_differs_in_rewards_and_in_what_made_them() -> None:
    group = recorded([0.0, 1.0])
    measured = {"accuracy": 0.0, "response_tokens": 12.0, "time/scoring": 0.5, "format_score": 0.1}
    group = replace(group, experiences=tuple(replace(one, metrics=measured) for one in group.experiences))
    new = decode_outcome(regraded(encode_outcome(group), [(0.5, {"accuracy": 1.0}), (-1.0, {})], "other", '{"a": 1}'))
    assert isinstance(new, Group)
    assert [one.reward for one in new.experiences] == [0.5, -1.0]
    kept = {"response_tokens": 12.0, "time/scoring": 0.5}
    assert [one.metrics for one in new.experiences] == [{**kept, "accuracy": 1.0}, kept]
    assert new.task == replace(group.task, reward_function="other", reward_args_json='{"a": 1}')
    for old, now in zip(group.experiences, new.experiences, strict=True):
        assert (old.token_ids == now.token_ids).all()
        assert (old.logprobs == now.logprobs).all()
        assert old.version_spans == now.version_spans


def test_changes_of_rewards_advantages_and_order() -> None:
    changes = Changes()
    changes.add(recorded([0.0, 1.0, 1.0, 0.0], 1), [0.0, 1.0, 1.0, 0.0])  # as before
    changes.add(recorded([0.0, 1.0, 1.0, 0.0], 2), [0.0, 2.0, 2.0, 0.0])  # other rewards, the same advantages
    changes.add(recorded([0.0, 1.0, 1.0, 0.0], 3), [1.0, 0.0, 1.0, 0.0])  # two rollouts exchange their places
    changes.add(recorded([1.0, 1.0, 1.0, 1.0], 4), [1.0, 1.0, 1.0, 0.0])  # a group that now teaches
    changes.add(recorded([0.0, 1.0, 1.0, 1.0], 5), [0.0, 0.0, 0.0, 0.0])  # one that does not any more
    found = changes.as_json()
    assert (found["groups"], found["rollouts"]) == (5, 20)
    assert (found["groups_changed"], found["rewards_changed"]) == (4, 8)
    assert (found["groups_reordered"], found["groups_without_signal"]) == (3, 1)
    assert found["advantages_of_other_sign"] == 2 + 4 + 4
    assert (found["reward_before"], found["reward_after"]) == (13 / 20, 11 / 20)
    assert found["advantage_difference_mean"] > 0
    assert [one["task"] for one in found["tasks"]] == ["sums/0/5", "sums/0/2", "sums/0/3", "sums/0/4"]
    assert found["tasks"][0] == {"task": "sums/0/5", "before": 0.75, "after": 0.0, "difference": 3.0}


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [
        (LeftOut(tasks=("sums/0/2",)), ""),
        (LeftOut(tasks=("other", "sums/0/1")), "without_task"),
        (LeftOut(tasks=("sums/*",)), "without_task"),
        (LeftOut(explorers=("tester",)), "without_explorer"),
        (LeftOut(explorers=("teste",)), ""),
        (LeftOut(versions=(range(4, 9),)), ""),
        (LeftOut(versions=(range(1, 3), range(3, 4))), "without_version"),
        (LeftOut(), ""),
    ],
)
def test_groups_are_left_out_by_task_explorer_and_version(left_out: LeftOut, reason: str) -> None:
    assert left_out.reason(recorded([0.0, 1.0], version=3)) == reason
