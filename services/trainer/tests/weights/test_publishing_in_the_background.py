"""A version is published from a copy of the weights, in a thread, while the next step changes the weights."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from trinity.runtime.errors import Conflict
from trinity.trainer.process.control import Control
from trinity.trainer.process.times import StepTimes
from trinity.trainer.publishing import VersionPublisher
from trinity.trainer.weights import write_shards
from trinity.trainer.weights.publisher import Publisher
from trinity.trainer.weights.shards import Snapshot, describe
from trinity.trainer.weights.verification import VerificationResults
from trinity.weights import TensorInfo, VersionState

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
        self.tensors = {"w": torch.zeros(1000)}

    def layout(self) -> list[TensorInfo]:
        return layout(self.tensors)

    def weights(self) -> Any:
        return iter(self.tensors.items())


class SlowPublisher:
    """Publishes once `go` is set: reads the weights then."""

    live_version = -1

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
    assert reserved == [0, versions._snapshot._buffer.data_ptr()], "the memory of the beginning"
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
    claim = SimpleNamespace(check=lambda: None, unreadable=None)
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
    monkeypatch.setattr(Snapshot, "take", lambda _, layout, weights: list(weights))
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


def test_the_end_waits_for_a_version_and_raises_nothing(versions: VersionPublisher) -> None:
    _, publisher = parts(versions)
    publisher.error = Conflict("no store takes it")
    versions.publish(1)
    threading.Timer(0.2, publisher.go.set).start()
    with capture_logs() as said:
        versions.close()
    assert [line["reason"] for line in said] == ["no store takes it"]
