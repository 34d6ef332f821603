"""A version that waits for its canary: one explorer is asked, another one if that one is gone, and its word decides."""

import asyncio
import math
import shutil
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.servers.sync_instances import CANARY, base_manifest, instance, make_manifest, make_member, measured, until
from trinity.runtime.errors import InvalidInput
from trinity.sync import canary, lifecycle
from trinity.sync.canary import problem_of
from trinity.sync.runs import Run
from trinity.sync.store.records import Member
from trinity.sync.versions import Register, Verify
from trinity.weights.manifest import CollectiveOffer, Manifest, S3Offer, check_files
from trinity.weights.wire import ExplorerState, VersionState

pytestmark = pytest.mark.core


@pytest.fixture
async def run(nats_url: str) -> AsyncIterator[Run]:
    """A run whose base model is LIVE. Leases and the time to judge are short."""
    async with instance(nats_url, lease_seconds=1.5, canary_seconds=30.0) as opened:
        await opened.versions.publish(base_manifest())
        yield opened


async def publish(run: Run, folder: Path, version: int) -> None:
    await run.versions.publish(make_manifest(folder, version, canary=True))


async def asked(run: Run, version: int, *names: str) -> str:
    """Who is asked to judge the version, once it is one of the names."""
    await until(lambda: run.state.candidate.version == version and run.state.candidate.explorer_id in names)
    return run.state.candidate.explorer_id


async def state(run: Run, version: int) -> VersionState:
    return (await run.versions.get(version)).state


async def keep_reporting(run: Run, member: Member) -> None:
    while True:
        await run.members.report(member.lease_id, version=0)
        await asyncio.sleep(0.2)


async def test_a_canary_that_is_reproduced_makes_the_version_live(run: Run, tmp_path: Path) -> None:
    member = await run.members.join(make_member("a"))
    await publish(run, tmp_path, 1)
    await asked(run, 1, "a")
    assert await state(run, 1) is VersionState.STAGED
    await run.canaries.measured(member, measured(1, 0.009))
    assert await state(run, 1) is VersionState.LIVE
    assert (await run.versions.get(1)).record.measured == measured(1, 0.009)


@pytest.mark.parametrize("error", [0.02, math.nan, math.inf])
async def test_one_that_is_not_rejects_it_with_both_numbers(run: Run, tmp_path: Path, error: float) -> None:
    member = await run.members.join(make_member("a"))
    await publish(run, tmp_path, 1)
    await asked(run, 1, "a")
    await run.canaries.measured(member, replace(measured(1, error), expected=-1.25, computed=-7.5))
    judged = await run.versions.get(1)
    assert judged.state is VersionState.REJECTED
    assert "expected a log-probability of -1.25" in judged.reason
    assert "computed -7.5" in judged.reason
    assert run.state.live.version == 0
    assert run.state.live.gate_step == 1


async def test_a_wrong_engine_withdraws_no_version_that_another_explorer_computes_right(
    run: Run, tmp_path: Path
) -> None:
    first, second = [await run.members.join(make_member(name)) for name in "ab"]
    await publish(run, tmp_path, 1)
    await asked(run, 1, "a")
    await run.canaries.measured(first, measured(1, 7.0))
    assert await state(run, 1) is VersionState.STAGED
    await asked(run, 1, "b")
    await run.canaries.measured(first, measured(1, 7.0))
    assert await state(run, 1) is VersionState.STAGED, "its report, sent again, is no second opinion"
    await run.canaries.measured(second, measured(1, 0.001, explorer_id="b"))
    assert await state(run, 1) is VersionState.LIVE


async def test_a_version_that_two_explorers_compute_wrong_is_rejected_with_both_reasons(
    run: Run, tmp_path: Path
) -> None:
    first, second = [await run.members.join(make_member(name)) for name in "ab"]
    await publish(run, tmp_path, 1)
    await asked(run, 1, "a")
    await run.canaries.measured(first, measured(1, 7.0))
    await asked(run, 1, "b")
    await run.canaries.measured(second, measured(1, 8.0, explorer_id="b"))
    judged = await run.versions.get(1)
    assert judged.state is VersionState.REJECTED
    assert judged.reason.count("the trainer expected") == 2
    assert judged.record.measured == measured(1, 8.0, explorer_id="b")


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "is silent"])
async def test_where_the_second_explorer_gives_no_answer_the_first_ones_rejects(
    leaves: bool, nats_url: str, tmp_path: Path
) -> None:
    async with instance(nats_url, lease_seconds=30.0, canary_seconds=2.0) as run:
        await run.versions.publish(base_manifest())
        first, second = [await run.members.join(make_member(name)) for name in "ab"]
        await publish(run, tmp_path, 1)
        await asked(run, 1, "a")
        await run.canaries.measured(first, measured(1, 7.0))
        await asked(run, 1, "b")
        if leaves:
            await run.members.leave(second.lease_id)
        async with asyncio.timeout(20):  # an explorer computes no canary twice: `first` reports nothing more
            while await state(run, 1) is not VersionState.REJECTED:
                await asyncio.sleep(0.05)
        judged = await run.versions.get(1)
        assert judged.record.measured == measured(1, 7.0)
        assert judged.reason.count("the trainer expected") == 1
        async with asyncio.timeout(20):  # the pointer is written after the record
            while run.state.live.gate_step != 1:
                await asyncio.sleep(0.05)


class SlowFiles:
    """The comparison of files in place of lifecycle.check_files: it takes until `go_on`, and is counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read, self._go_on = 0, threading.Event()
        monkeypatch.setattr(lifecycle, "check_files", self._check)
        monkeypatch.setattr(canary, "_FILES_SECONDS", 0.05)

    def _check(self, manifest: Manifest, folder: Path) -> None:
        self.read += 1
        assert self._go_on.wait(20)
        check_files(manifest, folder)

    def go_on(self) -> None:
        self._go_on.set()


def damage(folder: Path) -> None:
    path = folder / "part.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "damaged"])
async def test_an_explorer_judges_while_the_files_are_read_and_both_count(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    member, files = await run.members.join(make_member("a")), SlowFiles(monkeypatch)
    made = make_manifest(tmp_path, 1, canary=True)
    if not whole:
        damage(tmp_path / "v1")
    publishing = asyncio.create_task(run.versions.publish(made))
    await asked(run, 1, "a")
    await run.canaries.measured(member, measured(1))
    assert await state(run, 1) is VersionState.STAGED, "half of the proof"
    files.go_on()
    if whole:
        await publishing
        await run.canaries.measured(member, measured(1))
        assert await state(run, 1) is VersionState.LIVE
    else:
        with pytest.raises(InvalidInput, match=r"part\.safetensors"):
            await publishing
        await run.canaries.measured(member, measured(1))
        assert await state(run, 1) is VersionState.REJECTED
    assert files.read == 1


async def test_no_explorer_is_asked_for_a_broadcast_before_the_files_are_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins when the publication is answered: a member would wait for it, and for ever if it is refused."""
    await run.members.join(make_member("a"))
    files, made = SlowFiles(monkeypatch), make_manifest(tmp_path, 1, canary=True)
    damage(tmp_path / "v1")
    made = replace(made, offers=(*made.offers, CollectiveOffer(1, 1024)))
    publishing = asyncio.create_task(run.versions.publish(made))
    await until(lambda: files.read == 1)
    assert run.state.records.keys() == {0}
    files.go_on()
    with pytest.raises(InvalidInput, match=r"part\.safetensors"):
        await publishing
    assert await state(run, 1) is VersionState.REJECTED
    assert run.state.candidate.version != 1


async def test_files_that_an_instance_died_over_are_read_by_the_next(
    run: Run, nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, files = await run.members.join(make_member("a")), SlowFiles(monkeypatch)
    made = make_manifest(tmp_path, 1, canary=True)
    damage(tmp_path / "v1")
    publishing = asyncio.create_task(run.versions.publish(made))
    await asked(run, 1, "a")
    for task in (publishing, *run.versions._comparisons.values()):
        task.cancel()
    async with instance(nats_url, lease_seconds=1.5) as next_one:
        files.go_on()
        await next_one.canaries.measured(member, measured(1))
        await until(lambda: next_one.state.records[1].state is VersionState.REJECTED)
    assert files.read == 2


async def test_files_that_go_while_they_are_read_reject_no_version_that_was_overtaken(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SlowFiles(monkeypatch)
    overtaken = asyncio.create_task(run.versions.publish(make_manifest(tmp_path, 1, canary=True)))
    await until(lambda: 1 in run.state.records)
    await run.versions._register(Register(replace(run.state.records[1], version=2, step=2, has_canary=False)))
    await run.versions.apply(2, Verify(measured(2)))
    assert 1 in await run.versions.collect([], 1)
    shutil.rmtree(tmp_path / "v1")
    files.go_on()
    assert (await overtaken).state is VersionState.STAGED


def test_the_mean_and_the_largest_difference_both_count() -> None:
    assert problem_of(CANARY, replace(measured(1), mean_error=0.01, max_error=0.1), "float32") == ""
    assert "mean difference 0.011" in problem_of(CANARY, replace(measured(1), mean_error=0.011), "float32")
    assert "largest 0.11, at most 0.1" in problem_of(CANARY, replace(measured(1), max_error=0.11), "float32")


@pytest.mark.parametrize(("precision", "factor"), [("", 1), ("bfloat16", 1), ("fp8", 3), ("bfloat16, cache fp8", 3)])
def test_engines_that_quantize_may_differ_more(precision: str, factor: int) -> None:
    canary = replace(CANARY, quantized_factor=3.0)
    just, more = (replace(measured(1), mean_error=factor * 0.01 + extra) for extra in (-1e-6, 1e-3))
    assert problem_of(canary, just, precision) == ""
    assert "mean difference" in problem_of(canary, more, precision)


async def test_an_explorer_that_dies_under_its_canary_is_replaced(run: Run, tmp_path: Path) -> None:
    first, second = [await run.members.join(make_member(name)) for name in "ab"]
    await publish(run, tmp_path, 1)
    await asked(run, 1, "a")
    async with asyncio.TaskGroup() as group:
        reports = group.create_task(keep_reporting(run, second))
        await asked(run, 1, "b")
        reports.cancel()
    await run.canaries.measured(second, measured(1))
    assert await state(run, 1) is VersionState.LIVE
    assert run.members.seconds_left(first.lease_id) == 0


async def test_one_that_leaves_is_replaced_at_once(run: Run, tmp_path: Path) -> None:
    first = await run.members.join(make_member("a"))
    await run.members.join(make_member("b"))
    await publish(run, tmp_path, 1)
    await asked(run, 1, "a")
    await run.members.leave(first.lease_id)
    await asked(run, 1, "b")


async def test_without_explorers_the_trainer_goes_on_and_a_later_joiner_judges(run: Run, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        await publish(run, tmp_path, version)
    assert [judged.state for judged in run.versions.all()[:3]] == [VersionState.STAGED] * 3
    assert run.state.live.version == 0
    member = await run.members.join(make_member("late"))
    await asked(run, 3, "late")
    await run.canaries.measured(member, measured(3, explorer_id="late"))
    assert [judged.state for judged in run.versions.all()[:3]] == [
        VersionState.LIVE, VersionState.STAGED, VersionState.STAGED,
    ]  # fmt: skip
    await asyncio.sleep(0.4)
    assert run.state.candidate.version == 3, "no explorer is asked about what was overtaken"


async def test_a_newer_version_waits_for_a_canary_under_way(run: Run, tmp_path: Path) -> None:
    member = await run.members.join(make_member("a"))
    await publish(run, tmp_path, 1)
    await asked(run, 1, "a")
    await publish(run, tmp_path, 2)
    attempt = run.state.candidate.attempt
    await asyncio.sleep(0.4)
    assert run.state.candidate.attempt == attempt
    await run.canaries.measured(member, measured(1))
    assert run.state.live.version == 1
    await asked(run, 2, "a")


async def test_after_a_rejection_the_older_one_that_waits_is_judged(run: Run, tmp_path: Path) -> None:
    for version in (1, 2):
        await publish(run, tmp_path, version)
    member = await run.members.join(make_member("a"))
    await asked(run, 2, "a")
    await run.canaries.measured(member, measured(2, 1.0))
    await asked(run, 1, "a")
    await run.canaries.measured(member, measured(1))
    assert await state(run, 1) is VersionState.LIVE


async def test_a_version_that_two_explorers_cannot_load_is_rejected(run: Run, tmp_path: Path) -> None:
    first, second = [await run.members.join(make_member(name)) for name in "ab"]
    await publish(run, tmp_path, 1)
    await asked(run, 1, "a")
    await run.canaries.failed(first, 1, "part.safetensors: has checksum 1")
    await run.canaries.failed(first, 1, "the same report, sent again")
    assert await state(run, 1) is VersionState.STAGED
    await asked(run, 1, "b")
    await run.canaries.failed(second, 1, "part.safetensors: has checksum 2")
    judged = await run.versions.get(1)
    assert judged.state is VersionState.REJECTED
    assert "a: part.safetensors: has checksum 1; b: part.safetensors: has checksum 2" in judged.reason


async def test_the_only_explorer_gets_a_second_chance(run: Run, tmp_path: Path) -> None:
    member = await run.members.join(make_member("a"))
    await publish(run, tmp_path, 1)
    await asked(run, 1, "a")
    first = run.state.candidate.attempt
    await run.canaries.failed(member, 1, "no room on my disk")
    await until(lambda: run.state.candidate.attempt > first)
    await run.canaries.measured(member, measured(1))
    assert await state(run, 1) is VersionState.LIVE


async def test_the_only_explorer_failing_twice_rejects_the_version(run: Run, tmp_path: Path) -> None:
    member = await run.members.join(make_member("a"))
    await publish(run, tmp_path, 1)
    for attempt in (1, 2):
        await until(lambda wanted=attempt: run.state.candidate.attempt == wanted)
        await run.canaries.failed(member, 1, "damaged")
    assert await state(run, 1) is VersionState.REJECTED


async def test_a_storage_that_does_not_answer_is_no_verdict_and_another_explorer_is_asked(
    run: Run, tmp_path: Path
) -> None:
    first, second = [await run.members.join(make_member(name)) for name in "ab"]
    await publish(run, tmp_path, 1)
    for name, member in (("a", first), ("b", second), ("a", first)):
        await asked(run, 1, name)
        await run.canaries.failed(member, 1, "s3: no answer", is_passing=True)
    judged = await run.versions.get(1)
    assert (judged.state, judged.record.failures) == (VersionState.STAGED, ())
    await asked(run, 1, "b")
    await run.canaries.measured(second, measured(1, explorer_id="b"))
    assert await state(run, 1) is VersionState.LIVE


async def test_the_only_explorer_is_asked_again_for_as_long_as_its_storage_is_away(run: Run, tmp_path: Path) -> None:
    member = await run.members.join(make_member("a"))
    await publish(run, tmp_path, 1)
    for _ in range(3):
        await asked(run, 1, "a")
        attempt = run.state.candidate.attempt
        await run.canaries.failed(member, 1, "s3: no answer", is_passing=True)
        await until(lambda before=attempt: run.state.candidate.attempt > before)
    await run.canaries.measured(member, measured(1))
    assert await state(run, 1) is VersionState.LIVE


async def test_a_failure_of_an_explorer_that_was_not_asked_does_not_count(run: Run, tmp_path: Path) -> None:
    await run.members.join(make_member("a"))
    other = await run.members.join(make_member("b"))
    await publish(run, tmp_path, 1)
    await asked(run, 1, "a")
    await run.canaries.failed(other, 1, "damaged")
    await run.canaries.measured(other, measured(1, 5.0, "b"))
    judged = await run.versions.get(1)
    assert (judged.state, judged.record.failures) == (VersionState.STAGED, ())
    await run.canaries.measured(other, measured(1, 0.0, "b"))
    assert await state(run, 1) is VersionState.LIVE, "but who reproduces it proves that the weights are right"


async def test_members_that_only_report_are_asked_once_each(nats_url: str, tmp_path: Path) -> None:
    """Two phantoms, replaced by each other, would keep every version from an explorer that judges."""
    async with instance(nats_url, lease_seconds=30.0, canary_seconds=0.5) as run:
        await run.versions.publish(base_manifest())
        members = [await run.members.join(make_member(name)) for name in ("a/1", "a/2", "b", "honest")]
        for version, names in ((1, ("a/1", "b", "honest")), (2, ("honest",))):
            await publish(run, tmp_path, version)
            for name in names:
                await until(lambda version=version: run.state.candidate.version == version)
                assert await asked(run, version, *names[names.index(name) :]) == name
            await run.canaries.measured(members[-1], measured(version, explorer_id="honest"))
            assert await state(run, version) is VersionState.LIVE


async def test_a_slow_explorer_is_replaced_if_there_is_another(nats_url: str, tmp_path: Path) -> None:
    async with instance(nats_url, canary_seconds=0.5) as run:
        await run.members.join(make_member("a"))
        await publish(run, tmp_path, 1)
        await asked(run, 1, "a")
        attempt = run.state.candidate.attempt
        await asyncio.sleep(0.8)
        assert run.state.candidate.attempt == attempt, "no other explorer could do it, and it may be nearly done"
        await run.members.join(make_member("b"))
        await asked(run, 1, "b")


async def test_who_evaluates_and_who_cannot_load_it_are_spared(run: Run, tmp_path: Path) -> None:
    evaluating = await run.members.join(make_member("a"))
    await run.members.report(evaluating.lease_id, state=ExplorerState.EVALUATING)
    await run.members.join(make_member("b", 1, "s3"))
    await run.members.join(make_member("c"))
    await publish(run, tmp_path, 1)
    await asked(run, 1, "c")


async def test_an_explorer_that_could_not_load_it_is_not_asked(run: Run, tmp_path: Path) -> None:
    await run.members.join(make_member("a", 1, "s3"))
    await publish(run, tmp_path, 1)
    await asyncio.sleep(0.4)
    assert run.state.candidate.version == -1
    manifest = replace(make_manifest(tmp_path, 2, canary=True), offers=(S3Offer("bucket", "v2"),))
    await run.versions.publish(manifest)
    await asked(run, 2, "a")


async def test_a_broadcast_is_judged_by_a_member_of_its_group(run: Run, tmp_path: Path) -> None:
    await run.members.join(make_member("a"))
    able: Member = await run.members.join(make_member("b", 1, "folder", "collective-gloo"))
    await run.members.report(able.lease_id, state=ExplorerState.RUNNING, version=0)
    epoch = await run.epochs.form(run.members.all(), "gloo", ("127.0.0.1:1", "00"), (), renew=False)
    manifest = make_manifest(tmp_path, 1, canary=True)
    offers = (CollectiveOffer(epoch.number, 1024), *manifest.offers)
    await run.versions.publish(replace(manifest, offers=offers))
    await asked(run, 1, "b")


async def test_two_instances_ask_one_explorer(run: Run, nats_url: str, tmp_path: Path) -> None:
    async with instance(nats_url, lease_seconds=1.5) as two:
        for version in range(1, 6):
            one_member = await run.members.join(make_member("a"))
            await publish(two, tmp_path, version)
            await asked(two, version, "a")
            attempt = two.state.candidate.attempt
            await until(lambda wanted=attempt: run.state.candidate.attempt == wanted)
            assert attempt == version
            await two.canaries.measured(one_member, measured(version))
            await until(lambda wanted=version: run.state.live.version == wanted)
