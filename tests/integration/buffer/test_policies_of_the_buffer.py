"""How groups become batches, as the YAML says it: operators, replay, staleness, time limits, expert rows.

The buffer, sync and NATS are real processes; the explorer and the trainer are hand-written.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from support.fakes.data.experience import make_group
from support.fakes.peers import FakeTrainer, explorer
from support.servers.buffer_run import BufferRun
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.config.algorithms import resolve
from trinity.config.schema.algorithm import AlgorithmConfig
from trinity.data.experience import Group, Outcome, Task
from trinity.runtime.errors import EXIT_FOR_GOOD
from trinity.trainer.data.batch import from_groups

pytestmark = pytest.mark.core

Started = Callable[..., "contextlib.AbstractAsyncContextManager[tuple[BufferRun, FakeTrainer]]"]


def rewards_of(task: Task, *rewards: float, version: int = 0) -> Group:
    group = make_group(task, version=version)
    changed = zip(group.experiences, rewards, strict=True)
    return replace(group, experiences=tuple(replace(e, reward=reward) for e, reward in changed))


async def test_where_operators_drop_group_after_group_the_run_says_why_and_ends(started: Started) -> None:
    """With 2 groups in the pool, of the 4 that a batch has, the limit is 3 * (4 + 2) groups."""

    def answer(task: Task, _: int) -> Outcome:
        return rewards_of(task, 0, 1, 3, -9) if task.ordinal <= 2 or mended else rewards_of(task, 1, 1, 1, 1)

    mended = False
    pipeline = {"operators": [{"name": "reward_std_filter"}], "max_dropped_batches": 3}
    async with started(steps=2, data_processor={"experience_pipeline": pipeline}) as (run, trainer):
        assert "dropped" not in (await trainer.stats()).waiting_for
        async with explorer(run.nats.url, run.run, answer):
            assert await asyncio.to_thread(run.buffer.wait, 60) == EXIT_FOR_GOOD
        (reason,) = [str(event["reason"]) for event in run.buffer.events() if event["event"] == "service.failed"]
        assert "operators dropped 18 groups, and 2 of the 4 for the next batch are there: " in reason
        assert "reward_std_filter dropped 18 of 20 groups: no reward variance" in reason
        mended = True
        run.buffer.start()
        async with asyncio.timeout(30):
            while "groups: no reward variance" not in (said := (await trainer.stats()).waiting_for):
                await asyncio.sleep(0.1)
        assert "of 4 groups are missing; reward_std_filter dropped " in said
        async with explorer(run.nats.url, run.run, answer):
            await trainer.batch(2)


async def entries(trainer: FakeTrainer, steps: int) -> list[pb.LedgerEntry]:
    return [await trainer.entry(step) for step in range(1, steps + 1)]


async def test_what_operators_drop_is_said_and_made_up_for_and_what_they_change_is_trained(started: Started) -> None:
    def answer(task: Task, _: int) -> Outcome:
        return rewards_of(task, 1, 1, 1, 1) if task.ordinal % 3 == 0 else rewards_of(task, 0, 1, 3, -9)

    operators = [{"name": "reward_std_filter"}, {"name": "reward_filter", "args": {"threshold": -1.0}}]
    async with started(data_processor={"experience_pipeline": {"operators": operators}}) as (run, trainer):
        async with explorer(run.nats.url, run.run, answer):
            parts = [pb.BatchPart.FromString(part) for part in await trainer.batch(run.steps)]
        ledger = await entries(trainer, run.steps)
        stats = await trainer.stats()
    used = [group.ordinal for entry in ledger for group in entry.groups]
    assert used == [o for o in range(1, 60) if o % 3][: run.steps * run.groups], "refilled, in the order of tasks"
    dropped = {drop.ordinal: drop.reason for entry in ledger for drop in entry.dropped}
    assert set(dropped.values()) == {"reward_std_filter"}
    assert all(ordinal % 3 == 0 for ordinal in dropped)
    assert stats.fed == stats.stored + stats.dead_letters + stats.outstanding
    assert stats.stored >= len(used) + len(dropped)
    assert list(ledger[0].operators) == ["reward_std_filter", "reward_filter"]
    assert [(e.index, e.reward) for e in ledger[0].groups[0].experiences] == [(0, 0), (1, 1), (2, 3)]
    entry, *groups = parts[0].entry, *(part.group.outcome for part in parts if part.HasField("group"))
    batch = from_groups(entry, groups, resolve(AlgorithmConfig(algorithm_type="grpo")))
    assert [sequence.reward for sequence in batch.sequences] == [0, 1, 3] * run.groups
    assert entry.reward_mean == pytest.approx(4 / 3)


async def test_a_masked_experience_counts_in_its_group_and_trains_no_token(started: Started) -> None:
    def answer(task: Task, _: int) -> Outcome:
        group = rewards_of(task, 0, 1, 0, 1)
        cut = replace(group.experiences[2], truncation=3)  # type: ignore[arg-type]
        return replace(group, experiences=(*group.experiences[:2], cut, group.experiences[3]))

    operators = [{"name": "mask_response_truncated"}]
    changes: dict[str, Any] = {"data_processor": {"experience_pipeline": {"operators": operators}}}
    async with started(steps=1, **changes) as (run, trainer), explorer(run.nats.url, run.run, answer):
        parts = [pb.BatchPart.FromString(part) for part in await trainer.batch(1)]
    groups = [part.group.outcome for part in parts if part.HasField("group")]
    batch = from_groups(parts[0].entry, groups, resolve(AlgorithmConfig(algorithm_type="grpo")))
    assert [bool(s.mask.any()) for s in batch.sequences] == [True, True, False, True] * run.groups
    assert len({round(s.advantage, 6) for s in batch.sequences}) == 2


async def test_replay_uses_groups_again_and_step_k_stays_the_same_batch(started: Started) -> None:
    buffer = {"experience_buffer": {"replay_buffer": {"enable": True, "reuse_cooldown_time": 0.2}}}
    changes: dict[str, Any] = {"buffer": {"trainer_input": buffer, "batch_size": 4, "total_steps": 5}}
    changes["synchronizer"] = {"sync_style": "fully_async", "sync_interval": 1000}

    def answer(task: Task, _: int) -> Outcome:
        return make_group(task)

    served = 0

    async def only_eight(run: BufferRun) -> None:
        nonlocal served

        def some(task: Task, deliveries: int) -> Outcome:
            nonlocal served
            served += 1
            return answer(task, deliveries)

        async with explorer(run.nats.url, run.run, some, drains=True):
            while served < 8:
                await asyncio.sleep(0.01)

    async with started(**changes) as (run, trainer):
        first, _ = await asyncio.gather(trainer.batch(1), only_eight(run))
        later = [await trainer.batch(step) for step in (2, 3, 4, 5)]
        ledger = await entries(trainer, 5)
        run.buffer.kill()
        run.buffer.start()
        assert [await trainer.batch(step) for step in range(1, 6)] == [first, *later]
    uses: dict[int, int] = {}
    for entry in ledger:
        assert len({group.ordinal for group in entry.groups}) == 4
        for group in entry.groups:
            uses[group.ordinal] = uses.get(group.ordinal, 0) + 1
            assert group.use_count == uses[group.ordinal]
    assert max(uses.values()) >= 2, "some were used again"
    assert {entry.policy for entry in ledger} == {"replay"}


async def test_stale_groups_are_dropped_at_their_step_and_others_come_in_the_order_of_storing(
    started: Started,
) -> None:
    changes: dict[str, Any] = {
        "algorithm": {"sample_strategy": "staleness_control", "sample_strategy_args": {"staleness_limit": 2}},
    }
    async with started(**changes) as (run, trainer):

        def answer(task: Task, deliveries: int) -> Outcome:
            return make_group(task)  # all by version 0

        async with explorer(run.nats.url, run.run, answer):
            for step in (1, 2, 3):
                await trainer.batch(step)
            with pytest.raises(TimeoutError):
                await trainer.batch(4, seconds=3)
        stats = await trainer.stats()
        ledger = await entries(trainer, 3)
    assert stats.dropped["stale"] > 0
    assert stats.fed == stats.stored + stats.dead_letters + stats.outstanding
    assert [group.staleness_steps for entry in ledger for group in entry.groups] == [0] * 4 + [1] * 4 + [2] * 4
    sequences = [group.log_sequence for entry in ledger for group in entry.groups]
    assert sequences == sorted(sequences)


async def test_after_max_read_timeout_the_trainer_gets_what_there_is(started: Started) -> None:
    silent = {2}

    async with started(
        buffer={"trainer_input": {"experience_buffer": {"max_read_timeout": 2.0}}, "batch_size": 4, "total_steps": 2}
    ) as (run, trainer):
        late = asyncio.Event()

        def answer(task: Task, deliveries: int) -> Outcome:
            return make_group(task)

        from support.fakes import peers

        async def work(task: Task, message: Any) -> None:
            if task.ordinal in silent:
                await late.wait()
            await peers.attempt.store(broker, peers.names.RunNames(run.run), answer(task, 1))
            await message.ack()

        async with await peers.connect(run.nats.url, "tester") as broker:
            queue = peers.TaskQueue(broker, peers.names.RunNames(run.run).tasks_stream, 16, work)
            running = asyncio.create_task(queue.run())
            await trainer.batch(1)
            entry = await trainer.entry(1)
            assert entry.partial
            assert [group.ordinal for group in entry.groups] == [1, 3, 4, 5]
            late.set()
            await trainer.batch(2)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        entry = await trainer.entry(2)
        assert not entry.partial
        assert [group.ordinal for group in entry.groups] == [2, 6, 7, 8], "the late one comes next"
        said = [event for event in run.buffer.events() if event["event"] == "buffer.ledger.partial"]
        assert [event["level"] for event in said] == ["error"]


async def test_expert_rows_come_beside_the_groups_the_same_for_every_reader(started: Started, tmp_path: Path) -> None:
    said = [[("user", f"q{i}"), ("assistant", f"a{i}")] for i in range(6)]
    talks = [[{"role": role, "content": text, "at": datetime(2026, 1, 1)} for role, text in one] for one in said]
    parquet.write_table(pyarrow.table({"messages": talks}), tmp_path / "expert.parquet")
    expert = {"path": str(tmp_path / "expert.parquet"), "storage_type": "file", "format": {"prompt_type": "messages"}}
    async with started(
        algorithm={"sample_strategy": "mix", "sample_strategy_args": {"expert_data_ratio": 0.5}},
        buffer={
            "train_batch_size": 8,
            "batch_size": 1,
            "total_steps": 6,
            "trainer_input": {"auxiliary_buffers": {"sft_dataset": expert}},
        },
    ) as (run, trainer):
        async with explorer(run.nats.url, run.run):
            first = await trainer.batch(2)
        run.buffer.kill()
        run.buffer.start()
        assert await trainer.batch(2) == first
    parts = [pb.BatchPart.FromString(part) for part in first]
    examples = [part.example for part in parts if part.HasField("example")]
    assert [(e.buffer, e.row) for e in examples] == [("sft_dataset", row) for row in (4, 5, 0, 1)]
    assert sum(part.HasField("group") for part in parts) == 1
    answer = {"role": "assistant", "content": "a4", "at": "2026-01-01 00:00:00"}
    assert json.loads(examples[0].messages_json)[-1] == answer


async def test_the_log_is_archived_as_it_came_and_as_operators_left_it(started: Started, tmp_path: Path) -> None:
    from trinity.archive import read_experiences

    def answer(task: Task, _: int) -> Outcome:
        return rewards_of(task, 1, 1, 1, 1) if task.ordinal == 3 else rewards_of(task, 0, 1, 3, -9)

    pipeline = {
        "operators": [{"name": "reward_std_filter"}, {"name": "reward_filter"}],
        "input_save_path": str(tmp_path / "input.db"),
    }
    kept = str(tmp_path / "kept.jsonl")
    async with started(
        data_processor={"experience_pipeline": pipeline},
        buffer={"trainer_input": {"experience_buffer": {"path": kept}}, "batch_size": 4, "total_steps": 3},
        steps=3,
    ) as (run, trainer):
        async with explorer(run.nats.url, run.run, answer, publish_twice=True):
            await trainer.batch(2)
            run.buffer.kill()
            run.buffer.start()
            await trainer.batch(3)
        async with asyncio.timeout(30):
            while (await trainer.stats()).archive_behind:
                await asyncio.sleep(0.1)
        stored = (await trainer.stats()).stored
    whole = read_experiences(pipeline["input_save_path"], "pipeline_input")  # type: ignore[arg-type]
    left = read_experiences(kept, "experience_buffer")
    assert len(whole) == stored
    assert len(left) == stored - 1
    assert [e.reward for e in left[0].experiences] == [0, 1, 3]
    expected = rewards_of(left[0].task, 0, 1, 3, -9).experiences[2]
    found = left[0].experiences[2]
    assert np.array_equal(found.token_ids, expected.token_ids)
    assert np.array_equal(found.logprobs, expected.logprobs)
