"""Explorers on three transports at once, while versions are made: they join, hang, die and leave.

One party for all cases, in the order of this file. The explorers are real but for their engines (torch_engine.py), the
maker of versions uses the trainer's publisher and collective group, without learning. What vLLM makes of a collective
group is in tests/integration/test_trainer_and_engine_agree.py, of a load that breaks off in test_weights_on_real_vllm.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from chaos.versions.audit import names_both_numbers
from chaos.versions.maker import Maker
from chaos.versions.party import RUN, Party, TransformersPolicy
from support.servers.s3 import S3Server
from support.servers.service import ServiceProcess
from trinity.api.explorer.v1 import explorer_pb2, explorer_pb2_grpc
from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.weights.wire import ExplorerState

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

FOLDER, S3, GROUP = "by-folder", "by-s3", "by-group"
ALL = (FOLDER, S3, GROUP)
DEADLINE = 6.0
STOP_SECONDS = float(os.environ.get("TRINITY_CHAOS_STOP_SECONDS", "12"))
CHANCE = random.Random(os.environ.get("TRINITY_CHAOS_SEED", "1"))
TENSORS = 40  # a few fewer than the model has


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3")).start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def party(
    s3: S3Server,
    repository: Path,
    quickstart_model: Path,
    quickstart_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Party]:
    made = Party(repository, quickstart_model, quickstart_data, tmp_path_factory.mktemp("party"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment.items():
            patch.setenv(name, value)
        made.start(LEASE_SECONDS="8", CANARY_SECONDS="30")
        made.add(FOLDER, "folder")
        made.add(S3, "s3")
        made.add(GROUP, "collective,folder")  # all three join at once
        yield made
        made.end()


@pytest.fixture(scope="module")
def maker(party: Party, quickstart_model: Path) -> Iterator[Maker]:
    made = Maker(
        party.sync.address,
        RUN,
        TransformersPolicy(quickstart_model),
        party.folder,
        ("folder", "s3://weights/party"),
        nats_url=party.nats.url,
        collective=True,
        deadline_seconds=DEADLINE,
    )
    party.until_all_serve(0, ALL, 240)
    yield made
    made.close()


def test_three_transports_at_once_give_the_same_version_and_canary(party: Party, maker: Maker) -> None:
    for _ in range(4):  # on S3: whole, difference, difference, whole
        version = maker.publish()
        party.until_all_serve(version, ALL)
        members = party.members()
        assert {name: members[name].transport for name in ALL} == {FOLDER: "folder", S3: "s3", GROUP: "collective-gloo"}
        assert all(0 <= member.canary_max_error < 1e-3 for member in members.values()), members
    assert party.versions()[2].manifest.delta.base_version == 1
    for name in ALL:  # and not only in the canary's tokens
        completion = party.generate(name, [9, 8, 7], 12)
        tokens = [9, 8, 7, *_int32(completion.token_ids.data)]
        assert _float32(completion.logprobs.data) == pytest.approx(maker.logprobs(version, tokens)[2:], abs=1e-3)
        assert [span.version for span in completion.version_spans] == [version]


def test_wrong_weights_with_right_checksums_are_rejected_with_both_numbers(party: Party, maker: Maker) -> None:
    good = maker.version
    bad = maker.publish(canary=maker.canary(maker.weights_of(good)))  # the trainer says these are the old weights
    rejected = party.until(lambda: (v := party.versions()[bad]).state == pb.VERSION_STATE_REJECTED and v, 60, "verdict")
    assert names_both_numbers(rejected), rejected
    party.until_all_serve(good, ALL)
    for name in ALL:
        assert [span.version for span in party.generate(name, [4, 4], 8).version_spans] == [good]
    party.until_all_serve(maker.publish(), ALL)  # the next one is fine


def test_a_damaged_shard_is_found_before_any_member_pauses(party: Party, maker: Maker) -> None:
    good = maker.version

    def damaged(publish: Callable[[], Any]) -> Any:
        shard = next((party.folder / "weights" / f"v{good + 1}").glob("*.safetensors"))
        content = bytearray(shard.read_bytes())
        content[CHANCE.randrange(len(content))] ^= 1
        shard.write_bytes(content)
        return publish()

    maker.before_publishing(damaged)
    bad = maker.publish()
    assert party.versions()[bad].state == pb.VERSION_STATE_REJECTED
    assert "safetensors" in party.versions()[bad].reason
    assert {party.members()[name].version for name in ALL} == {good}
    party.until_all_serve(maker.publish(), ALL)


def in_a_broadcast(work: Callable[[], object]) -> Callable[[int], None]:
    """For publish: between two tensors, at a moment of this run's."""
    chosen = CHANCE.randrange(TENSORS)

    def after(index: int) -> None:
        if index == chosen:
            work()

    return after


def test_kill_9_during_a_collective_delays_no_member_beyond_the_deadline(party: Party, maker: Maker) -> None:
    begin = time.monotonic()
    version = maker.publish(after_tensor=in_a_broadcast(party.explorers[GROUP].kill))
    assert time.monotonic() - begin < 3 * DEADLINE
    assert party.explorers[GROUP]._process is None, "there was no broadcast to be killed in"
    party.until_all_serve(version, [FOLDER, S3], 2 * DEADLINE + 20)


def test_kill_9_during_a_load_leaves_the_others_alone(party: Party, maker: Maker) -> None:
    """What a load that broke off does to one engine: test_weights_on_real_vllm.py."""
    victim = party.explorers[FOLDER]
    with ThreadPoolExecutor(1) as beside, party.busy(S3) as served:
        struck = beside.submit(_kill_when_it_loads, victim)
        version = maker.publish()
        assert struck.result(30), "it was never seen loading"
        party.until_all_serve(version, [S3])
        asked = len(served)
        party.until(lambda: len(served) > asked, 60, "the other one answers on")


def _kill_when_it_loads(victim: ServiceProcess) -> bool:
    """kill -9 while its engine is paused; whether that was seen."""
    with grpc.insecure_channel(victim.address) as channel:
        ask = explorer_pb2_grpc.ExplorerServiceStub(channel).Status
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if ask(explorer_pb2.StatusRequest(), timeout=5).state == ExplorerState.UPDATING:
                victim.kill()
                return True
    return False


def test_two_join_at_once_in_the_middle_and_enter_the_group_later(party: Party, maker: Maker) -> None:
    party.add(GROUP, "collective,folder")
    party.add(FOLDER, "collective,folder")
    with party.busy(S3, max_tokens=40) as served:
        for _ in range(3):  # without waiting for them
            begin = time.monotonic()
            party.until_all_serve(maker.publish(), [S3])
            assert time.monotonic() - begin < 10
        party.until_all_serve(maker.version, ALL, 240)
        assert served
    party.until_all_serve(maker.publish(), ALL)
    members = party.members()
    assert {members[name].transport for name in (FOLDER, GROUP)} == {"collective-gloo"}, members


def test_a_member_stopped_during_a_collective_delays_no_member_and_comes_back_by_storage(
    party: Party, maker: Maker
) -> None:
    stopped = party.explorers[FOLDER]
    begin = time.monotonic()
    try:
        version = maker.publish(after_tensor=in_a_broadcast(lambda: _signal_tree(stopped.pid, signal.SIGSTOP)))
        assert time.monotonic() - begin < 3 * DEADLINE
        party.until_all_serve(version, [S3, GROUP], 4 * DEADLINE)
        version = maker.publish()  # the next epoch is without it
        party.until_all_serve(version, [S3, GROUP], 4 * DEADLINE)
        assert party.members()[GROUP].transport == "collective-gloo"
        time.sleep(max(0.0, STOP_SECONDS - (time.monotonic() - begin)))
    finally:
        _signal_tree(stopped.pid, signal.SIGCONT)
    party.until_all_serve(version, [FOLDER], 90)
    assert party.members()[FOLDER].transport == "folder"
    version = maker.publish()
    party.until_all_serve(version, ALL)


def test_sync_killed_while_a_version_goes_its_way(party: Party, maker: Maker) -> None:
    version = maker.publish()
    party.sync.kill()
    party.sync.start()
    party.until_all_serve(version, ALL, 90)
    assert party.versions()[version].state == pb.VERSION_STATE_LIVE
    party.until_all_serve(maker.publish(), ALL, 90)


def test_a_rollback_reaches_every_explorer_and_nothing_newer_is_served(party: Party, maker: Maker) -> None:
    target, newest = maker.version - 1, maker.version
    with party.busy(S3) as done:
        record = party.rollback(target)
        assert newest in record.withdrawn
        party.until_all_serve(target, ALL)
        served = len(done)
        party.until(lambda: len(done) >= served + 2, 120, "two more completions")
    assert {span.version for completion in done[served + 1 :] for span in completion.version_spans} == {target}
    assert party.versions()[newest].state == pb.VERSION_STATE_REJECTED
    version = maker.publish()
    assert version > newest  # one may have been refused: it came of a withdrawn version
    party.until_all_serve(version, ALL)


def test_sigterm_in_the_middle_of_a_response_leaves_in_good_order(party: Party, maker: Maker) -> None:
    with party.busy(GROUP, max_tokens=900):
        time.sleep(2)
        assert party.explorers.pop(GROUP).stop() in (0, 128 + signal.SIGTERM)
        assert GROUP not in party.members()
    party.until_all_serve(maker.publish(), [FOLDER, S3])


def _signal_tree(pid: int, signum: signal.Signals) -> None:
    """An explorer and its engine: the explorer leads a process group of its own."""
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        process.send_signal(signum)


def _int32(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()


def _float32(data: bytes) -> list[float]:
    return np.frombuffer(data, np.float32).tolist()
