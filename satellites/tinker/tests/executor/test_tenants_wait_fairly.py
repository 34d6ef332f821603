"""A tenant with a thousand commands delays another one by one command, and each gets its share of the seconds."""

import pytest

from trinity.tinker.commands.log import Command, Kind
from trinity.tinker.executor.queue import FairQueue

pytestmark = pytest.mark.core

PASS, STEP = Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP


class Waiting:
    """A queue whose commands take given seconds. `order`: tenants of the commands executed."""

    def __init__(self, seconds: dict[str, float], **limits: int) -> None:
        self.queue = FairQueue(0, {}, **limits)
        self.seconds, self.order, self.positions = seconds, list[str](), list[int]()
        self.last = 0

    def add(self, tenant: str, count: int = 1, kind: Kind = PASS, model: str = "", size: int = 8) -> None:
        for _ in range(count):
            self.last += 1
            self.queue.add(Command(kind, tenant, model or tenant, 1, b"x" * size, float(self.last), self.last))

    def execute(self, times: int = 1) -> list[str]:
        """Takes and executes so often, and returns the tenants."""
        begin = len(self.order)
        for _ in range(times):
            taken = self.queue.take()
            for command in taken:
                self.order.append(command.tenant)
                self.positions.append(command.position)
                self.queue.charge(command.tenant, self.seconds[command.tenant])
            self.queue.end(taken)
        return self.order[begin:]


def test_seconds_are_equal_whatever_a_command_takes() -> None:
    made = Waiting({"alice": 1.0, "bob": 3.0, "carol": 0.5})
    for tenant in made.seconds:
        made.add(tenant, 1000)
    for _ in range(60):
        made.execute(10)
        used = {tenant: made.order.count(tenant) * seconds for tenant, seconds in made.seconds.items()}
        assert max(used.values()) - min(used.values()) <= 3.0 + 1.0
    of_bob = [position for tenant, position in zip(made.order, made.positions, strict=True) if tenant == "bob"]
    assert of_bob == sorted(of_bob)


def test_a_light_tenant_waits_for_one_command() -> None:
    """It pauses nine tenths of the time. Its pass and its step go first, as soon as the other's command is executed."""
    made = Waiting({"noisy": 0.5, "light": 0.5})
    made.add("noisy", 1000)
    made.execute(50)
    for _ in range(20):
        made.add("light")
        made.add("light", kind=STEP)
        assert made.execute(20) == ["light"] * 2 + ["noisy"] * 18


def test_a_long_pass_is_interrupted_for_who_has_used_less() -> None:
    made = Waiting({"noisy": 20.0, "light": 0.5, "other": 0.5})
    made.add("noisy", 3)
    made.execute()
    begun = made.queue.take()
    assert not made.queue, "a tenant's commands wait for its own"
    assert not made.queue.is_behind("noisy")
    made.add("light", 20)
    made.add("other")
    assert made.queue.reached() == (1, 2.0)
    made.queue.charge("noisy", 0.5)
    assert made.queue.is_behind("noisy")
    assert made.execute(3) == ["light", "other", "light"]
    while made.queue.is_behind("noisy"):
        assert made.execute() == ["light"]
    assert 3 < made.order.count("light") * 0.5 < 4, "up to as much as the other one, 5 seconds ahead and 2 behind"
    made.queue.end(begun)
    assert made.queue.reached() == (2, 3.0)


def test_what_follows_a_pass_does_not_wait_for_passes_of_others() -> None:
    """Equal tenants end one after the other, so that some sample while others train."""
    made = Waiting({"alice": 0.5, "bob": 0.5})
    for tenant in made.seconds:
        made.add(tenant)
        made.add(tenant, kind=STEP)
        made.add(tenant, kind=Kind.SAVE_SAMPLER)
    assert made.execute(6) == ["alice"] * 3 + ["bob"] * 3
    made.add("alice", 10, kind=STEP)
    made.add("bob", 10, kind=STEP)
    assert made.execute(20)[:9] == ["bob"] * 4 + ["alice"] * 5, "up to two seconds ahead"


def test_idle_tenants_save_up_five_seconds() -> None:
    made = Waiting({"alice": 1.0, "bob": 1.0})
    made.add("alice", 100)
    made.execute(50)
    made.add("bob", 100)
    assert made.execute(12) == ["bob"] * 6 + ["alice", "bob"] * 3, "alice had begun another second"


def test_passes_of_other_models_are_taken_together_up_to_their_limits() -> None:
    made = Waiting({"alice": 1.0, "bob": 1.0, "carol": 1.0}, most=5, most_bytes=30)
    for tenant in ("alice", "bob"):
        for model in ("1", "2"):
            made.add(tenant, model=f"{tenant}{model}")
            made.add(tenant, kind=STEP, model=f"{tenant}{model}")
    made.add("alice", model="alice1")
    made.add("carol", size=100)
    made.add("alice", kind=Kind.SAVE_WEIGHTS)
    assert made.execute() == ["alice"] * 4 + ["bob"], "five, with a pass of each model"
    assert made.execute() == ["carol", "bob"], "a pass of the least seconds that is too large for others, and a step"
    assert made.execute() == ["bob", "bob", "alice"]
    assert made.execute() == ["alice"], "a save waits for what came before"
    assert not made.queue
    assert made.queue.bytes == 0


def test_what_is_reached_is_before_the_oldest_that_waits() -> None:
    made = Waiting({"alice": 1.0, "bob": 1.0})
    made.add("alice", 3)
    made.add("bob", 2)
    assert made.queue.counts() == {"alice": 3, "bob": 2}
    assert made.queue.reached() == (0, 1.0)
    made.execute(4)
    assert made.queue.reached() == (2, 3.0)
    made.execute()
    made.add("bob", kind=Kind.REFUSED)
    assert made.queue.reached() == (6, 6.0)
    again = FairQueue(2, {"bob": 5})
    for tenant, position in (("alice", 3), ("bob", 4), ("bob", 5), ("bob", 6)):
        again.add(Command(PASS, tenant, tenant, 1, b"", 0.0, position))
    assert [again.take()[0].position for _ in range(2)] == [3, 6]
