"""The collective group that carries weights, over gloo: real processes that receive, stop and die."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore

from integration import group_member
from integration.group_member import info
from support.checks.listeners import LOOPBACK, listeners
from support.programs.frozen import freeze
from trinity.runtime.errors import InvalidInput
from trinity.weights.collective import Group, GroupBroken, Store, plan_buckets, send

pytestmark = pytest.mark.core

TENSORS = ["embed:BF16:50x7", "scale:F32:", "nothing:F32:0x4", "layer:F32:30x30", "ids:I64:3"]
DEADLINE = 4.0
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}


def weights() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    infos = [info(text) for text in TENSORS]
    return [(i.name, torch.randn(i.shape, generator=generator).mul(9).to(DTYPES[i.dtype])) for i in infos]


class Party:
    """Rank 0 here, the others as processes."""

    def __init__(self, members: int, epoch: int = 1) -> None:
        self.store = Store.serve("127.0.0.1")
        command = [sys.executable, group_member.__file__, self.store.address, self.store.secret, str(epoch)]
        self.members = [
            subprocess.Popen(
                [*command, str(rank), str(members + 1), str(DEADLINE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(1, members + 1)
        ]
        self.group = Group(self.store, epoch, "gloo", 0, members + 1, torch.device("cpu"), 60)
        self.group._timeout = DEADLINE
        for member in self.members:
            assert self.read(member) == "entered"

    def read(self, member: "subprocess.Popen[str]", limit: float = 60) -> str:
        with ThreadPoolExecutor(1) as pool:
            assert member.stdout is not None
            return pool.submit(member.stdout.readline).result(limit).strip()

    def announce(self, bucket_bytes: int) -> None:
        for member in self.members:
            assert member.stdin is not None
            member.stdin.write(f"{bucket_bytes} {' '.join(TENSORS)}\n")
            member.stdin.flush()

    def send(self, bucket_bytes: int) -> None:
        send(self.group, [info(text) for text in TENSORS], weights(), bucket_bytes)

    def close(self) -> None:
        for member in self.members:
            member.send_signal(signal.SIGKILL)
            member.wait(10)
        self.group.close()


@pytest.fixture
def party() -> Iterator[Party]:
    made = Party(2)
    yield made
    made.close()


def test_every_member_gets_every_tensor_whatever_the_bucket(party: Party) -> None:
    expected = {name: float(tensor.double().sum()) for name, tensor in weights()}
    for bucket_bytes in (1, 1000, 10**6):
        party.announce(bucket_bytes)
        party.send(bucket_bytes)
        for member in party.members:
            assert json.loads(party.read(member)) == pytest.approx(expected)


@pytest.mark.parametrize("how", [freeze, lambda pid: os.kill(pid, signal.SIGKILL)], ids=["stopped", "killed"])
def test_a_member_that_is_gone_breaks_the_epoch_within_the_deadline(party: Party, how: Callable[[int], None]) -> None:
    how(party.members[0].pid)
    party.announce(1000)
    begin = time.monotonic()
    with pytest.raises(GroupBroken):
        for _ in range(50):  # sends to one that is gone may still fit into a socket's buffer
            party.send(1000)
    assert time.monotonic() - begin < 2 * DEADLINE + 2
    assert "broken" in json.loads(party.read(party.members[1], 3 * DEADLINE)) or how is freeze


def test_other_weights_than_those_announced_are_not_sent(party: Party) -> None:
    swapped = list(reversed(weights()))
    with pytest.raises(InvalidInput, match="embed is due, ids"):
        send(party.group, [info(text) for text in TENSORS], swapped, 1000)


def test_a_group_whose_members_do_not_come_is_given_up() -> None:
    store = Store.serve("127.0.0.1")
    begin = time.monotonic()
    with pytest.raises(GroupBroken, match="epoch 7"):
        Group(store, 7, "gloo", 0, 2, torch.device("cpu"), 2.0)
    assert time.monotonic() - begin < 10


def test_what_members_say_is_heard_and_silence_ends_with_the_deadline() -> None:
    store = Store.serve("127.0.0.1")
    other = Store.connect(store.address, store.secret, 5)
    assert store.heard("ready/a") is None
    other.say("ready/a")
    other.say("ready/b", yes=False)
    assert store.wait_all(["ready/a"], 1) == [True]
    begin = time.monotonic()
    assert store.wait_all(["ready/a", "ready/b", "ready/c"], 30) == [True, False, None]  # a no ends it at once
    assert time.monotonic() - begin < 5
    assert store.wait_all(["ready/a", "ready/c"], 0.3) == [True, None]


def test_a_stranger_is_told_nothing_and_changes_nothing() -> None:
    store = Store.serve("127.0.0.1")
    store.say("ready/a")
    with pytest.raises(GroupBroken, match="does not answer"):
        Store.connect(store.address, "00" * 32, 5)
    host, _, port = store.address.partition(":")
    with socket.create_connection((host, int(port)), 5) as speaking, socket.create_connection((host, int(port)), 5):
        assert len(speaking.recv(32)) == 32, "random bytes, the same for everybody"
        speaking.sendall(b"\0" * 1000)
        answer = b"-"
        while answer:  # until it is closed
            with contextlib.suppress(ConnectionResetError):
                answer = speaking.recv(1000)
                assert not answer, "not a byte to a wrong proof"
                continue
            break
        other = Store.connect(store.address, store.secret, 5)  # a silent connection keeps no member waiting
    assert other.heard("ready/a") is True


def test_a_client_of_torchs_store_sets_no_key() -> None:
    """With this one keys could once be set and deleted from elsewhere."""
    store = Store.serve("127.0.0.1")
    host, _, port = store.address.partition(":")
    with pytest.raises(torch.distributed.DistError):
        stranger = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)
        stranger.set("ready/a", "yes")
    assert store.heard("ready/a") is None
    assert Store.connect(store.address, store.secret, 20).heard("ready/a") is None


def test_the_server_is_known_to_its_members() -> None:
    """A process that took the port after the trainer ended, and accepts every proof."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        address = f"127.0.0.1:{impostor.getsockname()[1]}"

        def accept() -> None:
            connection, _ = impostor.accept()
            connection.sendall(b"\1" * 64)
            connection.recv(1000)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        with pytest.raises(GroupBroken, match="does not know the epoch's secret"):
            Store.connect(address, "11" * 32, 5)


def test_store_and_group_of_one_machine_listen_on_the_loopback(party: Party) -> None:
    for pid in (os.getpid(), *(member.pid for member in party.members)):
        found = {host for host, _ in listeners(pid)}
        assert found, "gloo listens in every process, and the store here"
        assert found <= set(LOOPBACK)


def test_a_store_that_no_process_serves_is_reported() -> None:
    with pytest.raises(GroupBroken, match="does not answer"):
        Store.connect("127.0.0.1:1", "00", 1.0)


def test_buckets_keep_the_order_and_hold_no_more_than_they_may() -> None:
    infos = [info(text) for text in TENSORS]
    for size in (1, 500, 1000, 4000, 10**6):
        buckets = plan_buckets(infos, size)
        assert [slot.tensor for bucket in buckets for slot in bucket.slots] == infos
        for bucket in buckets:
            assert len(bucket.slots) == 1 or sum(slot.tensor.size_bytes for slot in bucket.slots) <= size + 16 * 5
            ends = [slot.offset + slot.tensor.size_bytes for slot in bucket.slots]
            assert all(end <= slot.offset for end, slot in zip(ends, bucket.slots[1:], strict=False))
            assert all(slot.offset % 16 == 0 for slot in bucket.slots) and max(ends) <= bucket.size_bytes
