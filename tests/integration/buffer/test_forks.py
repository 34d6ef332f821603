"""A run that continues from a step of another one: the same tasks in the same order, and the groups sampled by then.

Buffers, sync and NATS are real processes; explorers are the real loop without an engine.
"""

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from support.fakes.data.experience import make_group
from support.fakes.peers import FakeTrainer, explorer
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.common.v1 import experience_pb2
from trinity.data.experience import Group, Outcome, Task
from trinity.lineage import wire
from trinity.runtime.errors import EXIT_FOR_GOOD

pytestmark = pytest.mark.timeout(300)

Started = Callable[..., "contextlib.AbstractAsyncContextManager[tuple[BufferRun, FakeTrainer]]"]

STEPS, GROUPS, AT = 7, 4, 3
ASYNC = {"steps": STEPS, "groups": GROUPS, "synchronizer": {"sync_interval": 1, "sync_offset": 1}}
OPERATOR = {"experience_pipeline": {"operators": [{"name": "reward_filter", "args": {"threshold": 0.4}}]}}


async def train(trainer: FakeTrainer, first: int, last: int, folder: Path) -> None:
    for step in range(first, last + 1):
        await trainer.batch(step)
        await trainer.publish(step, folder / f"version-{step}")
        await trainer.buffer.CommitStep(
            pb.CommitStepRequest(run=trainer.run, step=step, oldest_kept_step=min(step, AT)), timeout=20
        )


async def fork_parts(trainer: FakeTrainer, step: int) -> list[bytes]:
    call = trainer.buffer.Fork(pb.ForkRequest(run=trainer.run, step=step))
    return [part.SerializeToString() async for part in call]


@pytest.mark.extended
@pytest.mark.parametrize("gone", [False, True])
async def test_a_flipped_byte_in_what_the_parent_gave_is_found(
    tmp_path: Path, nats_server: NatsServer, gone: bool
) -> None:
    """No restart would mend it, so the buffer ends for good."""
    (tmp_path / "flipped").mkdir()
    run = BufferRun(tmp_path / "flipped", nats_server, **ASYNC)  # type: ignore[arg-type]
    job = tmp_path / "flipped/jobs/tests/flipped"
    place([b"\x01" * 20], job, AT)
    about = json.loads((job / "fork.json").read_text())
    (job / "fork.json").write_text(json.dumps({**about, "parts": "0" * 64}))
    if gone:
        (job / "fork/parts.bin").unlink()
    try:
        with pytest.raises(AssertionError, match=r"parts.bin is missing, or not as fork.json says; remove the job"):
            run.start()
        assert run.buffer.wait(60) == EXIT_FOR_GOOD
    finally:
        run.stop()


def place(parts: list[bytes], job: Path, step: int) -> None:
    """As `trinity fork` does."""
    (job / "fork").mkdir(parents=True)
    (job / "fork/parts.bin").write_bytes(b"".join(len(part).to_bytes(4, "little") + part for part in parts))
    about = {"job": "", "run": "r", "name": "n", "stage": "", "step": step}
    (job / "fork.json").write_text(json.dumps(about))


@contextlib.asynccontextmanager
async def forked(
    folder: Path, nats: NatsServer, parts: list[bytes], step: int = AT, **changes: object
) -> AsyncIterator[tuple[BufferRun, FakeTrainer]]:
    """The buffer of a fork, whose trainer has published the step's weights."""
    folder.mkdir()
    run = BufferRun(folder, nats, **{**ASYNC, **changes})  # type: ignore[arg-type]
    place(parts, folder / "jobs/tests" / folder.name, step)
    run.start()
    trainer = run.trainer()
    try:
        await trainer.begin()
        await trainer.publish(step, folder / f"version-{step}")
        yield run, trainer
    finally:
        await trainer.close()
        run.stop()


def content(batch: list[bytes]) -> list[tuple[object, ...]]:
    """Task, versions and tokens of each group of a batch."""
    found: list[tuple[object, ...]] = []
    for data in batch:
        part = pb.BatchPart.FromString(data)
        if part.WhichOneof("part") == "group":
            group = experience_pb2.Outcome.FromString(part.group.outcome).group
            task, experiences = group.task, group.experiences
            found.append(
                (task.ordinal, task.task_id, [one.SerializeToString(deterministic=True) for one in experiences])
            )
    return found


def played(task: Task, played_tasks: list[int]) -> Group:
    """The same task gives the same group for a version, as in a reproducible run."""
    played_tasks.append(task.ordinal)
    group = make_group(replace(task, ordinal=task.ordinal + 1000 * task.gate_step), version=task.gate_step)
    return replace(group, task=task)


@pytest.mark.parametrize(
    "filters",
    [
        pytest.param(False, marks=pytest.mark.core, id="all groups"),
        pytest.param(True, marks=pytest.mark.extended, id="with an operator"),
    ],
)
async def test_a_fork_trains_the_same_batches(
    filters: bool, started: Started, tmp_path: Path, nats_server: NatsServer
) -> None:
    pipeline = {"data_processor": OPERATOR} if filters else {}
    tasks: list[int] = []
    async with (
        started(**ASYNC, **pipeline) as (run, trainer),
        explorer(nats_server.url, run.run, lambda task, _: played(task, tasks)),
    ):
        await train(trainer, 1, STEPS, tmp_path / "weights")
        parts = await fork_parts(trainer, AT)
        digests = [(await trainer.entry(step)).sha256 for step in (AT, AT + 1)]
        batches = {step: content(await trainer.batch(step)) for step in range(AT + 1, STEPS + 1)}
        with pytest.raises(grpc.aio.AioRpcError, match="has no ledger entry"):
            await fork_parts(trainer, STEPS + 1)
    again: list[int] = []
    async with forked(tmp_path / "forked", nats_server, parts, **pipeline) as (run, trainer):
        shared_entry = await trainer.entry(AT)
        assert (shared_entry.run, shared_entry.sha256) == (run.run, digests[0]), "the chain of both is one up to here"
        async with explorer(nats_server.url, run.run, lambda task, _: played(task, again)):
            for step in range(AT + 1, STEPS + 1):
                assert content(await trainer.batch(step)) == batches[step], f"step {step}"
                await trainer.publish(step, tmp_path / f"forked/version-{step}")
                if step == AT + 2:
                    run.buffer.kill()  # it begins again from its own log and ledger
                    run.buffer.start()
            stats = await trainer.stats()
        following = await trainer.entry(AT + 1)
        assert following.previous_sha256 == digests[0]
        assert following.sha256 != digests[1], "its time and its place in the log are its own"
    assert stats.fed == stats.stored + stats.dead_letters + stats.outstanding
    assert stats.ledger_step == STEPS
    shared = {ordinal for ordinal, *_ in batches[AT + 1]}
    assert not shared & set(again), "groups of weights that both share were sampled again"
    assert set(again) < set(tasks)


@pytest.mark.extended
async def test_tasks_that_the_parent_left_out_are_fed_again(
    started: Started, tmp_path: Path, nats_server: NatsServer
) -> None:
    """The parent's explorer held one task of step 4 until weights of step 4 were there; a fork samples it itself."""
    held = AT * GROUPS + 2
    holds = True

    def answer(task: Task, deliveries: int) -> Outcome | None:
        group = make_group(task, version=task.gate_step)
        return replace(group, task=task) if task.ordinal != held or not holds else None

    changes = {**ASYNC, "settings": {"UNREPORTED_SECONDS": "1"}}
    async with started(**changes) as (run, trainer), explorer(nats_server.url, run.run, answer):
        await train(trainer, 1, AT, tmp_path / "weights")
        parts = await fork_parts(trainer, AT)
    fed: list[int] = []
    async with (
        forked(tmp_path / "forked", nats_server, parts) as (run, trainer),
        explorer(nats_server.url, run.run, lambda task, _: played(task, fed)),
    ):
        first = content(await trainer.batch(AT + 1))
        await trainer.publish(AT + 1, tmp_path / "forked/version-next")
        second = content(await trainer.batch(AT + 2))
    assert [ordinal for ordinal, *_ in first + second] == list(range(AT * GROUPS + 1, (AT + 2) * GROUPS + 1))
    assert held in fed
    positions = [int(str(task_id).split("/")[2]) for _, task_id, _ in first + second]
    assert positions == list(range(AT * GROUPS, (AT + 2) * GROUPS))


@pytest.mark.extended
async def test_a_fork_whose_parts_are_cut_off_does_not_begin(
    started: Started, tmp_path: Path, nats_server: NatsServer
) -> None:
    async with started(**ASYNC) as (run, trainer), explorer(nats_server.url, run.run, lambda task, _: played(task, [])):
        await train(trainer, 1, AT, tmp_path / "weights")
        parts = await fork_parts(trainer, AT)
    folder = tmp_path / "forked"
    folder.mkdir()
    fork = BufferRun(folder, nats_server, **ASYNC)  # type: ignore[arg-type]
    place(parts[: AT - 1], folder / "jobs/tests/forked", AT)
    try:
        fork.sync.start()
        with pytest.raises(AssertionError, match="lacks an entry up to step 3"):
            fork.buffer.start()
        assert fork.buffer.wait(60) == EXIT_FOR_GOOD
    finally:
        fork.stop()


def regraded(parts: list[bytes], left_out: dict[int, str]) -> list[bytes]:
    """As `trinity regrade` does: rewards of all rollouts but the first are 0 now, that of the first is 1."""
    changed = []
    for part in parts:
        found = wire.group_part(part)
        if found is None:
            changed.append(part)
            continue
        ordinal, outcome = found
        count = len(experience_pb2.Outcome.FromString(outcome).group.experiences)
        scores = [(float(index == 0), {"accuracy": 1.0}) for index in range(count)]
        new = wire.regraded(outcome, scores, "other_reward", "{}")
        changed.append(wire.regraded_part(part, new, left_out.get(ordinal, "")))
    return changed


@pytest.mark.parametrize("filters", [pytest.param(False, id="all groups"), pytest.param(True, id="with an operator")])
@pytest.mark.extended
async def test_a_regrade_trains_stored_groups_with_other_rewards_and_samples_only_then(
    filters: bool, started: Started, tmp_path: Path, nats_server: NatsServer
) -> None:
    pipeline = {
        "data_processor": {
            "experience_pipeline": {"operators": [{"name": "reward_filter", "args": {"threshold": 0.2}}]}
        }
    }
    changes = pipeline if filters else {}
    async with (
        started(**ASYNC) as (run, trainer),
        explorer(nats_server.url, run.run, lambda task, _: played(task, [])),
    ):
        await train(trainer, 1, STEPS, tmp_path / "weights")
        through = STEPS - 1
        call = trainer.buffer.Fork(pb.ForkRequest(run=trainer.run, step=AT, through_step=through))
        parts = [part.SerializeToString() async for part in call]
        parents = {step: (await trainer.entry(step)).groups for step in range(AT + 1, STEPS + 1)}
    stored = {group.ordinal: group for step in range(AT + 1, through + 1) for group in parents[step]}
    left_out = {min(stored): "without_task"}
    sampled: list[int] = []
    async with (
        forked(tmp_path / "regraded", nats_server, regraded(parts, left_out), **changes) as (run, trainer),
        explorer(nats_server.url, run.run, lambda task, _: played(task, sampled)),
    ):
        entries = {}
        for step in range(AT + 1, STEPS + 1):
            batch = await trainer.batch(step)
            entries[step] = await trainer.entry(step)
            for data in batch:
                part = pb.BatchPart.FromString(data)
                if part.WhichOneof("part") != "group" or part.group.ordinal not in stored:
                    continue
                group = experience_pb2.Outcome.FromString(part.group.outcome).group
                assert [one.reward for one in group.experiences] == [1.0, 0.0, 0.0, 0.0]
                assert (group.task.reward_function, group.task.run) == ("other_reward", run.run)
            await trainer.publish(step, tmp_path / f"regraded/version-{step}")
            if step == AT + 1:
                run.buffer.kill()
                run.buffer.start()
            if step < through:
                assert not set(sampled) & set(stored)
        stats = await trainer.stats()
    assert stats.fed == stats.stored + stats.dead_letters + stats.outstanding
    used = {group.ordinal: group for entry in entries.values() for group in entry.groups}
    assert set(stored) - set(used) == set(left_out), "each stored group is trained once, but the one left out"
    assert sum(len(entry.groups) for entry in entries.values()) == (STEPS - AT) * GROUPS == len(used)
    assert {drop.ordinal: drop.reason for entry in entries.values() for drop in entry.dropped} == left_out
    assert set(used) - set(stored) <= set(sampled)
    for ordinal, parent in stored.items():
        if ordinal in left_out:
            continue
        assert used[ordinal].parent_sha256 == parent.outcome_sha256 != used[ordinal].outcome_sha256
        assert used[ordinal].parent_steps == max(0, parent.newest_version - AT)
        assert used[ordinal].newest_version == min(parent.newest_version, AT)
        step = next(step for step, entry in entries.items() if used[ordinal] in entry.groups)
        passed = max(0, step - 1 - min(parent.oldest_version, AT))
        assert used[ordinal].staleness_steps == passed + max(0, parent.newest_version - AT)
        if filters:
            assert [(one.index, one.reward) for one in used[ordinal].experiences] == [(0, 1.0)]
            assert used[ordinal].reward_mean == 1.0


@pytest.mark.parametrize("again", [pytest.param(False, id="fork"), pytest.param(True, id="regrade")])
@pytest.mark.extended
async def test_a_run_begins_from_a_regrade_whose_groups_wait(
    again: bool, started: Started, tmp_path: Path, nats_server: NatsServer
) -> None:
    """The groups that wait were sampled by versions of the first run, above the shared step."""
    async with (
        started(**ASYNC) as (run, trainer),
        explorer(nats_server.url, run.run, lambda task, _: played(task, [])),
    ):
        await train(trainer, 1, STEPS, tmp_path / "weights")
        call = trainer.buffer.Fork(pb.ForkRequest(run=trainer.run, step=AT, through_step=STEPS))
        parts = [part.SerializeToString() async for part in call]
    at, found = AT + 1, []
    for name, step in (("regraded", AT), ("second", at)):
        given = parts if name == "second" and not again else regraded(parts, {})
        async with forked(tmp_path / name, nats_server, given, step) as (_, trainer):
            batches, ages = {}, {}
            for later in range(step + 1, STEPS + 1):
                batches[later] = [ordinal for ordinal, *_ in content(await trainer.batch(later))]
                groups = (await trainer.entry(later)).groups
                ages[later] = [(one.oldest_version, one.newest_version, one.parent_steps) for one in groups]
                await trainer.publish(later, tmp_path / f"{name}/version-{later}")
                if later == at and step == AT:
                    call = trainer.buffer.Fork(
                        pb.ForkRequest(run=trainer.run, step=at, through_step=STEPS if again else 0)
                    )
                    parts = [part.SerializeToString() async for part in call]
        found.append((batches, ages))
    (first, first_ages), (second, second_ages) = found
    assert second == {step: first[step] for step in range(at + 1, STEPS + 1)}
    assert second_ages == {step: first_ages[step] for step in second}
    assert any(parent_steps for ages in second_ages.values() for *_, parent_steps in ages)
