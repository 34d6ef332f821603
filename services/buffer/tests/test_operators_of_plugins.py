"""Experience operators of users: functions and classes of plugins."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.fakes.data.experience import make_task
from support.fakes.data.operators import KEY, PLACE, experience, group_of, kept, pipeline, rewarded, run
from trinity import plugins
from trinity.buffer.operators import Draft
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

# Operators of plugins


@pytest.fixture
def register() -> Iterator[Callable[[Any], str]]:
    def _register(operator: Any) -> str:
        plugins.experience_operator("mine")(operator)
        return "mine"

    yield _register
    plugins.EXPERIENCE_OPERATORS.pop("mine", None)


def test_a_function_gets_drafts_task_and_the_yamls_args(register: Callable[[Any], str]) -> None:
    def mine(drafts: list[Draft], task: Any, args: dict[str, Any]) -> dict[str, float]:
        drafts[0].drop()
        drafts[1].reward *= args["factor"]
        drafts[2].masked = True
        return {"answers": len(task.raw["answer"])}

    done = run(rewarded(1.0, 2.0, 3.0), register(mine), factor=2)
    assert [(draft.index, draft.reward, draft.masked) for draft in done.drafts] == [(1, 4.0, False), (2, 3.0, True)]
    assert [draft.dropped_by for draft in done.dropped] == ["mine"]
    assert done.metrics == {f"{KEY}/mine/answers": 6.0}


def test_a_call_cannot_change_the_args_of_the_next(register: Callable[[Any], str]) -> None:
    def mine(drafts: list[Draft], task: Any, args: dict[str, Any]) -> dict[str, float]:
        return {"margin": args.pop("margin", 2.0)}

    chain = pipeline((register(mine), {"margin": 1.5}))
    assert [chain.run(rewarded(1.0)).metrics[f"{KEY}/mine/margin"] for _ in range(3)] == [1.5, 1.5, 1.5]


def test_a_class_is_made_once_with_the_args(register: Callable[[Any], str]) -> None:
    class Mine:
        def __init__(self, limit: int = 3) -> None:
            self.limit, self.calls = limit, 0

        def __call__(self, drafts: list[Draft], task: Any) -> dict[str, float]:
            self.calls += 1
            return {"calls": self.calls, "limit": self.limit}

    chain = pipeline((register(Mine), {"limit": 5}))
    chain.run(rewarded(1.0))
    assert chain.run(rewarded(1.0)).metrics == {f"{KEY}/mine/calls": 2.0, f"{KEY}/mine/limit": 5.0}
    with pytest.raises(
        InvalidInput, match=r"operators\.0\.args: mine: TypeError: .*unexpected keyword argument 'limt'"
    ):
        pipeline(("mine", {"limt": 5}))


def test_what_is_taken_out_of_the_list_is_dropped_too(register: Callable[[Any], str]) -> None:
    def mine(drafts: list[Draft], task: Any, args: dict[str, Any]) -> None:
        drafts.remove(drafts[1])
        drafts.reverse()

    done = run(rewarded(1.0, 2.0, 3.0), register(mine))
    assert kept(done) == [0, 2]
    assert [(draft.index, draft.dropped_by) for draft in done.dropped] == [(1, "mine")]


def test_metrics_that_one_operator_adds_are_there_for_the_next(register: Callable[[Any], str]) -> None:
    def mine(drafts: list[Draft], task: Any, args: dict[str, Any]) -> None:
        for draft in drafts:
            draft.metrics["tokens"] = draft.experience.response_length

    shaping = ("reward_shaping_mapper", {"reward_shaping_configs": [{"stats_key": "tokens"}]})
    group = rewarded(1.0, metrics={"accuracy": 1.0})
    assert pipeline(register(mine), shaping).run(group).drafts[0].reward == 5.0
    assert group.experiences[0].metrics == {"accuracy": 1.0}


def _stop(*_: Any) -> None:
    raise SystemExit(3)


def _set(field: str, value: Any) -> Callable[..., None]:
    return lambda drafts, task, args: setattr(drafts[0], field, value)


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        (lambda drafts, task, args: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda drafts, task, args: args["limit"], "KeyError: 'limit'"),
        (_stop, "SystemExit: 3"),
        (lambda drafts, task, args: [1], "AttributeError: 'list' object has no attribute 'items'"),
        (lambda drafts, task, args: {"a": "x"}, "metrics: a: is 'x', must be a number"),
        (_set("reward", math.nan), "draft 0: the reward becomes nan, must be finite"),
        (_set("reward", math.inf), "draft 0: the reward becomes inf, must be finite"),
        (_set("reward", None), "draft 0: reward: is None, must be a number"),
        (_set("experience", experience()), "draft 0: has another experience than the group; they stay as stored"),
        (_set("index", 7), "draft 7: has another experience"),
        (lambda drafts, task, args: drafts.append(drafts[0]), "drafts: one is in the list twice"),
        (lambda drafts, task, args: drafts.append(3), "AttributeError"),
    ],
)
def test_an_operator_that_fails_is_named_and_the_next_group_goes_on(
    register: Callable[[Any], str], operator: Callable[..., Any], said: str
) -> None:
    def mine(drafts: list[Draft], task: Any, args: dict[str, Any]) -> Any:
        return operator(drafts, task, args) if task.ordinal == 1 else None

    chain = pipeline("reward_filter", register(mine))
    with pytest.raises(InvalidInput) as refused:
        chain.run(rewarded(1.0, 2.0))
    assert refused.value.field == f"{PLACE}.1"
    assert f"mine fails for sums/0/1: {said}" in str(refused.value)
    assert chain.metrics() == {}
    assert kept(chain.run(replace(rewarded(1.0, 2.0), task=make_task(2)))) == [0, 1]


def test_a_built_in_name_keeps_its_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugins.EXPERIENCE_OPERATORS, "reward_filter", _stop)
    assert kept(run(rewarded(-1.0, 1.0), "reward_filter")) == [1]


def test_the_example_of_the_docs_works(register: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[3] / "docs/plugins.md").read_text()
    section = text[text.index("## An experience operator") :]
    exec(section.split("```python\n")[1].split("```")[0], {})
    group = group_of(experience(1.0, 0, response=4), experience(1.0, 1, response=8), experience(0.0, 2, response=40))
    done = run(group, "shortest_right", margin=1.5)
    assert [(draft.index, draft.reward) for draft in done.drafts] == [(0, 1.0), (1, 0.5), (2, 0.0)]
