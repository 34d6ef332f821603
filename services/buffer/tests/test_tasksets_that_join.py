"""Whose turn it is while explorers bring tasksets of their own, and how far each was fed."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from trinity.buffer.tasks.joined import JoinedTasksets, why_not_joined
from trinity.config import Config, make_plan
from trinity.data.experience import Task, TaskKind
from trinity.data.task_source import TaskMixture, TaskSource

pytestmark = pytest.mark.core


@pytest.fixture
def tasks(tmp_path: Path) -> list[Task]:
    (tmp_path / "train.jsonl").write_text("".join(f'{{"question": "{i}+1"}}\n' for i in range(30)))
    plan = make_plan(config(tmp_path))
    source = TaskSource.open("run", plan, plan.tasksets[0], TaskKind.TRAIN)
    assert TaskMixture([source]).weight == 60
    return [source.train_task(position, 1, 0) for position in range(30)]


def config(folder: Path, **changes: object) -> Config:
    taskset = {"name": "sums", "path": str(folder), "weight": 2.0}
    fields = {
        "model": {"model_path": "m", "max_model_len": 64},
        "buffer": {"batch_size": 2, "explorer_input": {"taskset": taskset}},
    }
    return Config.model_validate({**fields, **changes})


def fed(joined: JoinedTasksets, turns: int) -> list[str]:
    """Names of the tasksets of the next `turns`; "" is the run's own."""
    found = []
    for _ in range(turns):
        turn = joined.take()
        found.append(turn[0] if turn is not None else "")
        if turn is not None:
            joined.keep(joined.advanced(turn[0]))
            turn[1].stored.set_result(True)
    return found


async def test_each_gets_its_part_of_the_turns_evenly(tasks: list[Task]) -> None:
    joined = JoinedTasksets(own_weight=60, most_credit=2)
    joined.add("one", 20.0, tasks)
    joined.add("two", 40.0, tasks)
    turns = fed(joined, 60)
    assert Counter(turns) == {"": 30, "two": 20, "one": 10}
    for first in range(0, 60, 6):
        assert turns[first : first + 6].count("two") in (1, 2, 3)
    assert (joined.fed("one"), joined.fed("two")) == (10, 20)


async def test_a_taskset_without_waiting_tasks_takes_no_turn_and_catches_up_little(tasks: list[Task]) -> None:
    joined = JoinedTasksets(own_weight=60, most_credit=2)
    joined.add("one", 60.0, tasks[:1])
    assert Counter(fed(joined, 40)) == {"": 39, "one": 1}
    joined.add("one", 60.0, tasks[1:])
    assert Counter(fed(joined, 8))["one"] <= 6


async def test_tasks_of_a_caller_that_is_gone_are_not_fed(tasks: list[Task]) -> None:
    joined = JoinedTasksets(own_weight=1, most_credit=2)
    first = joined.add("one", 100.0, tasks[:3])
    assert fed(joined, 1) == ["one"]
    for wait in first[1:]:
        wait.cancel()
    assert (joined.fed("one"), joined.position("one")) == (1, 1)
    assert fed(joined, 3) == ["", "", ""]
    joined.add("one", 100.0, tasks[1:2])
    turn = joined.take()
    assert turn is not None and turn[1].task.task_id == tasks[1].task_id


async def test_positions_are_those_of_the_header() -> None:
    joined = JoinedTasksets(1, 1)
    text = joined.to_header({"one": 7, "two": 0})
    joined.keep(joined.from_header(text))
    assert (joined.fed("one"), joined.position("two"), joined.names) == (7, 0, ["one", "two"])
    for wrong in ("", "{", "[1]", '{"one": -1}', '{"one": "1"}', "[" * 5000):
        assert joined.from_header(wrong) == {}
    await asyncio.sleep(0)


@pytest.mark.parametrize("name", ["", "a b", "a*", "é", "n" * 129])
def test_names_that_are_no_tokens_are_refused(name: str) -> None:
    assert JoinedTasksets(1, 1).problem(name)


def test_at_most_64_tasksets_join() -> None:
    joined = JoinedTasksets(1, 1)
    joined.keep({f"t{i}": 1 for i in range(64)})
    assert "64" in joined.problem("another")
    assert not joined.problem("t3")


def test_runs_that_cannot_mix_say_why(tmp_path: Path) -> None:
    synchronous = make_plan(config(tmp_path))
    assert "synchronizer.sync_offset" in why_not_joined(synchronous)
    ahead = make_plan(config(tmp_path, synchronizer={"sync_interval": 10}))
    assert why_not_joined(ahead) == ""
    same = make_plan(config(tmp_path, synchronizer={"sync_interval": 10}, reproducible=True))
    assert "reproducible" in why_not_joined(same)
