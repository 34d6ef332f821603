"""A version is published from a copy of the weights, in a thread, while the next step changes the weights."""

import errno
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from trinity.runtime.errors import Conflict, InvalidInput
from trinity.trainer.process.control import Control
from trinity.trainer.process.times import StepTimes
from trinity.trainer.publishing import VersionPublisher
from trinity.trainer.weights import shards, write_shards
from trinity.trainer.weights.publisher import Publisher
from trinity.trainer.weights.shards import VERSION_FILES, Snapshot, describe
from trinity.trainer.weights.verification import VerificationResults
from trinity.weights.manifest import TensorInfo
from trinity.weights.wire import VersionState

pytestmark = [pytest.mark.core, pytest.mark.timeout(60)]

CPU = torch.device("cpu")


def layout(weights: dict[str, torch.Tensor]) -> list[TensorInfo]:
    return [describe(name, tensor.dtype, tensor.shape) for name, tensor in weights.items()]


def of_three_dtypes() -> dict[str, torch.Tensor]:
    """The second would begin at an odd byte of the third, were they laid end to end."""
    return {
        "a": torch.arange(3).to(torch.bfloat16),
        "b": torch.arange(6.0).view(2, 3),
        "none": torch.empty(0, 4),
        "c": torch.arange(5).to(torch.float16),
    }


def test_a_snapshot_does_not_change_with_the_weights() -> None:
    weights = of_three_dtypes()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    taken = Snapshot(CPU).take(layout(weights), weights.items())
    for tensor in weights.values():
        tensor.add_(1)
    for _ in range(2):
        assert [name for name, _ in taken] == list(before)
        assert all(torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype for name, tensor in taken)


def test_the_next_snapshot_has_the_same_memory_unless_the_sizes_differ() -> None:
    snapshot, weights = Snapshot(CPU), of_three_dtypes()
    places = [tensor.data_ptr() for _, tensor in snapshot.take(layout(weights), weights.items())]
    weights["b"].mul_(-1)
    again = dict(snapshot.take(layout(weights), weights.items()))
    assert [tensor.data_ptr() for tensor in again.values()] == places
    assert torch.equal(again["b"], weights["b"])
    larger = {"a": torch.ones(100)}
    assert torch.equal(dict(snapshot.take(layout(larger), larger.items()))["a"], larger["a"])


def test_a_snapshot_is_written_while_it_is_taken(tmp_path: Path) -> None:
    weights, first = of_three_dtypes(), threading.Event()
    folder, snapshot = tmp_path / "s", Snapshot(CPU).expect(layout(weights))

    def lent() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            if name == "c":
                assert first.wait(20), "no file before the last tensor"
            yield name, tensor

    taking = threading.Thread(target=snapshot.take, args=(layout(weights), lent()))
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(write_shards, snapshot, layout(weights), folder, "p-{}.safetensors", 1, all_stay=True)
        taking.start()
        while not (folder / "p-0.safetensors").exists() and not writing.done():
            time.sleep(0.01)
        first.set()
        taking.join(20)
    plain = write_shards(weights.items(), layout(weights), tmp_path / "plain", "p-{}.safetensors", 1)
    assert writing.result() == plain


def test_nothing_is_written_of_a_snapshot_that_was_not_taken(tmp_path: Path) -> None:
    weights = of_three_dtypes()
    snapshot = Snapshot(CPU).expect(layout(weights))
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(write_shards, snapshot, layout(weights), tmp_path, "p-{}.safetensors", all_stay=True)
        snapshot.abandon()
        with pytest.raises(RuntimeError, match="not copied"):
            writing.result(20)
    assert torch.equal(dict(snapshot.take(layout(weights), weights.items()))["b"], weights["b"]), "the next one is"


@pytest.mark.parametrize("shard_bytes", [1, 40, 10**6])
def test_a_copy_that_is_the_versions_files_is_what_is_written_else(
    tmp_path: Path, shard_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, with the same checksums; and files that were given away do not change."""
    monkeypatch.setattr(shards, "SHARD_BYTES", shard_bytes)
    weights, memory = of_three_dtypes(), tmp_path / "memory"
    snapshot = Snapshot(CPU, memory)
    for version in ("v1", "v2"):
        plain = write_shards(weights.items(), layout(weights), tmp_path / version, VERSION_FILES, shard_bytes)
        snapshot.expect(layout(weights))
        assert [len(list(memory.glob(".next.*"))), (memory / version).exists()] == [1, False]
        with ThreadPoolExecutor(1) as thread:
            giving = thread.submit(snapshot.give, memory / version)
            snapshot.take(layout(weights), weights.items())
        assert giving.result() == plain
        assert dict(snapshot)["b"].equal(weights["b"]), "a broadcast may follow"
        snapshot.reserve(layout(weights))
        for tensor in weights.values():
            tensor.add_(1)
        snapshot.take(layout(weights), weights.items())
        for file in plain[1]:
            assert (memory / version / file.name).read_bytes() == (tmp_path / version / file.name).read_bytes()
    snapshot.close()
    assert sorted(path.name for path in memory.iterdir()) == ["v1", "v2"]


def test_files_ahead_of_a_killed_trainer_are_removed(tmp_path: Path) -> None:
    weights = of_three_dtypes()
    killed, snapshot = (Snapshot(CPU, tmp_path) for _ in range(2))
    killed.reserve(layout(weights))
    snapshot.reserve(layout(weights))
    assert len(list(tmp_path.iterdir())) == 1
    killed.take(layout(weights), weights.items())  # it was only suspended
    with pytest.raises(FileNotFoundError):
        killed.give(tmp_path / "v1")


def test_without_room_for_files_the_copy_is_in_the_processs_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, snapshot = of_three_dtypes(), Snapshot(CPU, tmp_path)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as no_room, capture_logs() as said:
        no_room.setattr(shards.os, "posix_fallocate", full)
        snapshot.take(layout(weights), weights.items())
    assert "No space left" in said[0]["reason"]
    assert not snapshot.has_files and not list(tmp_path.iterdir())
    assert torch.equal(dict(snapshot)["b"], weights["b"])
    snapshot.take(layout(weights), weights.items())
    assert snapshot.has_files, "there is room again"
    with pytest.raises(InvalidInput, match="expected c"):
        snapshot.expect(layout(weights)).take(layout(weights), [*[*weights.items()][:3], ("d", weights["c"])])
        snapshot.give(tmp_path / "v1")


@pytest.mark.parametrize("shard_bytes", [1, 40, 10**6])
def test_tensors_that_stay_are_written_as_all_others_are(tmp_path: Path, shard_bytes: int) -> None:
    weights = of_three_dtypes()
    plain = write_shards(weights.items(), layout(weights), tmp_path / "plain", "p-{}.safetensors", shard_bytes)
    taken = Snapshot(CPU).take(layout(weights), weights.items())
    found = write_shards(taken, layout(weights), tmp_path / "s", "p-{}.safetensors", shard_bytes, all_stay=True)
    assert found == plain
    for file in plain[1]:
        assert (tmp_path / "s" / file.name).read_bytes() == (tmp_path / "plain" / file.name).read_bytes()


class Engine:
    device, vocabulary = CPU, 10

    def __init__(self) -> None:
        self.weights, self.tensors = self, {"w": torch.zeros(1000)}

    def layout(self) -> list[TensorInfo]:
        return layout(self.tensors)

    def read(self) -> Any:
        return iter(self.tensors.items())


class SlowPublisher:
    """Publishes once `go` is set: reads the weights then."""

    live_version = -1
    memory: Path | None = None

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        self.published: dict[int, list[float]] = {}
        self.sent: list[float] = []
        self.polls = 0
        self.due_rollback: Any = None
        self.error: Exception | None = None

    def open(self, rollback: int) -> Any:
        return SimpleNamespace(is_new=False, probe=())

    def check_lost(self, step: int) -> None: ...

    def wants(self, step: int, due: bool) -> bool:
        return due

    def publish(self, step: int, layout: Any, weights: Any, canary: Any, entry: bytes) -> bool:
        self.begun.set()
        assert self.go.wait(20)
        if self.error is not None:
            raise self.error
        self.published[step] = dict(weights)["w"].unique().tolist()
        return True

    def broadcast(self, weights: Any) -> None:
        self.sent += dict(weights)["w"].unique().tolist()

    def check(self) -> None: ...

    def poll(self) -> bool:
        self.polls += 1
        return False

    def settle(self, seconds: float, stopping: Any, awaits_explorers: bool) -> None: ...


@pytest.fixture
def versions(tmp_path: Path) -> VersionPublisher:
    plan = SimpleNamespace(
        job_dir=tmp_path,
        staleness=SimpleNamespace(publishes=lambda step, last: True),
        config=SimpleNamespace(
            mode="train", reproducible=False, synchronizer=SimpleNamespace(canary=False, sync_timeout=1)
        ),
    )
    exchange = SimpleNamespace(share=lambda value: value, is_first=True)
    made: Any = (plan, exchange, Engine(), Control(), SlowPublisher(), None, StepTimes())
    return VersionPublisher(*made)


def parts(versions: VersionPublisher) -> tuple[Any, Any]:
    return versions.engine, versions.publisher


def test_the_next_step_trains_while_a_version_is_published_and_does_not_tear_it(versions: VersionPublisher) -> None:
    engine, publisher = parts(versions)
    engine.tensors["w"].fill_(1)
    versions.publish(1)
    assert publisher.begun.wait(20)
    engine.tensors["w"][::2] = 2  # half of a step
    assert not versions.poll(1)
    assert publisher.polls == 0, "the thread has the connections"
    publisher.go.set()
    engine.tensors["w"].fill_(2)
    versions.publish(2)
    versions.finish()
    assert publisher.published == {1: [1.0], 2: [2.0]}
    assert publisher.sent == [1.0, 2.0]
    assert (versions.plan.job_dir / "latest_state_dict_iteration.txt").read_text() == "2"
    versions.close()


def test_memory_for_versions_is_reserved_from_the_beginning_and_only_a_version_waits_for_it(
    versions: VersionPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, publisher = parts(versions)
    slow, reserve, reserved = threading.Event(), Snapshot.reserve, list[int]()

    def reserving(snapshot: Snapshot, layout: Any) -> None:
        if not reserved:
            assert slow.wait(20)
        before = snapshot._buffer.data_ptr()
        reserve(snapshot, layout)
        reserved.append(before)

    monkeypatch.setattr(Snapshot, "reserve", reserving)
    versions.open(0, 0)
    assert not versions.poll(0) and publisher.polls == 1
    first = threading.Thread(target=versions.publish, args=(1,))
    first.start()
    first.join(0.2)
    assert first.is_alive() and not publisher.begun.is_set()
    slow.set()
    publisher.go.set()
    first.join(20)
    versions.finish()
    assert publisher.published == {1: [0.0]}
    assert set(reserved) == {0, versions._snapshot._buffer.data_ptr()}, "the memory of the beginning"
    versions.close()


def test_a_reproducible_run_waits_until_the_version_before_is_live(versions: VersionPublisher) -> None:
    _, publisher = parts(versions)
    versions.plan.config.reproducible = True  # type: ignore[misc]
    live = threading.Event()

    def wait(stopping: Any) -> None:
        assert live.wait(20) and not stopping()

    publisher.wait_for_verification = wait
    publisher.go.set()
    versions.publish(1)
    assert not publisher.begun.wait(0.2)
    live.set()
    versions.finish()
    assert publisher.published == {1: [0.0]}
    versions.close()


def test_versions_that_are_not_judged_are_pending() -> None:
    """Publisher's part of it: until sync says that the version is LIVE."""
    states = iter([VersionState.STAGED, VersionState.VERIFIED, VersionState.LIVE])
    asked: list[str] = []

    def ask(call: Any) -> Any:
        asked.append(call.method)
        return SimpleNamespace(state=next(states))

    results = VerificationResults(SimpleNamespace(ask=ask), tuple, True, (0.1, 1.0), seconds=0.0)  # type: ignore[arg-type]
    claim = SimpleNamespace(check=lambda: None, held=SimpleNamespace(unreadable=None))
    publisher = Publisher(None, claim, results, SimpleNamespace(), 3)  # type: ignore[arg-type]
    results.expect(1)
    publisher.wait_for_verification(lambda: False)
    assert (len(asked), publisher.live_version, results.pending) == (3, 1, False)
    results.expect(2)
    publisher.wait_for_verification(lambda: True)
    assert len(asked) == 3, "a trainer that stops does not wait"


def test_the_test_before_sees_a_snapshot_that_is_no_copy(
    versions: VersionPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, publisher = parts(versions)
    engine.tensors["w"].fill_(1)

    def take(snapshot: Snapshot, layout: Any, weights: Any) -> None:
        for name, tensor in weights:
            snapshot._coming.add(name, tensor, None)
        snapshot._coming.end()

    monkeypatch.setattr(Snapshot, "take", take)
    versions.publish(1)
    assert publisher.begun.wait(20)
    engine.tensors["w"][::2] = 2
    publisher.go.set()
    versions.finish()
    assert publisher.published == {1: [1.0, 2.0]}, "torn"
    versions.close()


def test_one_version_is_published_at_a_time(versions: VersionPublisher) -> None:
    _, publisher = parts(versions)
    versions.publish(1)
    second = threading.Thread(target=versions.publish, args=(2,))
    second.start()
    second.join(0.3)
    assert second.is_alive() and publisher.published == {}
    publisher.go.set()
    second.join(20)
    versions.finish()
    assert list(publisher.published) == [1, 2]
    versions.close()


@pytest.mark.parametrize("call", ["poll", "publish", "finish"])
def test_what_a_version_failed_by_is_raised_by_the_next_call(versions: VersionPublisher, call: str) -> None:
    _, publisher = parts(versions)
    publisher.error = Conflict("no store takes it")
    versions.publish(1)
    publisher.go.set()
    publishing: Any = versions._publishing
    publishing.exception(20)
    with pytest.raises(Conflict, match="no store takes it"):
        versions.finish() if call == "finish" else getattr(versions, call)(2)
    assert versions.control.progress.state == "stopped"
    versions.close()


def test_a_rollback_waits_for_the_version_that_is_being_published(versions: VersionPublisher) -> None:
    _, publisher = parts(versions)
    versions.publish(1)
    publisher.due_rollback = SimpleNamespace(version=0)
    threading.Timer(0.2, publisher.go.set).start()
    assert versions.poll(1)
    assert publisher.published == {1: [0.0]} and publisher.polls == 1
    versions.close()


def test_weights_that_cannot_be_copied_are_not_published(versions: VersionPublisher) -> None:
    engine, publisher = parts(versions)
    publisher.go.set()

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        raise Conflict("the ranks disagree")
        yield

    engine.read = broken
    with pytest.raises(Conflict, match="the ranks disagree"):
        versions.publish(1)
    with capture_logs() as said:
        versions.close()
    assert [line["reason"] for line in said] == ["the weights were not copied"]
    assert publisher.published == {}


def test_the_end_waits_for_a_version_and_raises_nothing(versions: VersionPublisher) -> None:
    _, publisher = parts(versions)
    publisher.error = Conflict("no store takes it")
    versions.publish(1)
    threading.Timer(0.2, publisher.go.set).start()
    with capture_logs() as said:
        versions.close()
    assert [line["reason"] for line in said] == ["no store takes it"]
