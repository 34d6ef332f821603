"""Explorers by KEDA's formula on the lag of a live run's tasks: 1, 4, 1 under load; nothing lost, no task twice.

The ScaledObject is that of deploy/helm, with shorter times. The explorers are real but for their engines. Those
that are too many get SIGTERM while they work on tasks, as pods do.
"""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from chaos.versions.maker import Maker
from chaos.versions.tasks import GROUPS, TaskRun
from chaos.versions.world import World
from support.checks.keda import Autoscaler, lag_of
from support.programs.member_process import MemberProcess
from support.servers.helm import of_kind, render
from support.servers.nats import NatsServer

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, AHEAD, RESPONSE = 24, 11, 200
BURST = GROUPS * (AHEAD + 1)  # tasks that are fed at once
KEDA = {
    "enabled": True,
    "minReplicas": 1,
    "maxReplicas": 4,
    "lagThreshold": BURST // 4,
    "pollingSeconds": 1,
    "cooldownSeconds": 5,
    "scaleDownSeconds": 2,
}
ACCOUNT = "$G"  # of a server that lets everybody in


class ScaledRun(TaskRun):
    """Its explorers are as many as the autoscaler says: `counts`, whenever they change."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name, steps=STEPS, ahead=AHEAD, response=RESPONSE)
        self.counts: list[int] = []
        self.codes: list[int] = []
        self._made = 0
        self._over = threading.Event()
        scaled = of_kind(render(self.config, keda=KEDA), "ScaledObject")["explorer"]
        self._scaler, self._triggers = Autoscaler.of(scaled), scaled["spec"]["triggers"]
        self._polling_seconds: float = scaled["spec"]["pollingInterval"]
        self._polls = threading.Thread(target=self._follow, daemon=True)

    def open(self, *members: str) -> "ScaledRun":
        self.buffer.start()
        self.settings["environment_address"] = self.world.environment.address
        self._polls.start()
        self.maker = Maker(self.world.sync.address, self.run, self.world.policy, self.folder)
        return self

    def lags(self) -> list[int]:
        assert isinstance(self.world.nats, NatsServer)
        monitor = f"127.0.0.1:{self.world.nats.monitor}"
        asked = [one["metadata"] for one in self._triggers]
        return [lag_of([monitor], ACCOUNT, one["stream"], one["consumer"]) for one in asked]

    def _follow(self) -> None:
        while not self._over.wait(self._polling_seconds):
            wanted = self._scaler.replicas(self.lags(), len(self.explorers), time.monotonic())
            while len(self.explorers) < wanted:
                self._start()
            while len(self.explorers) > wanted:
                newest = next(reversed(self.explorers))
                self.codes.append(self.explorers.pop(newest).stop())
            if self.counts[-1:] != [wanted]:
                self.counts.append(wanted)

    def _start(self) -> None:
        self._made += 1
        name = f"explorer-{self._made}"
        addresses: dict[str, Any] = {"nats_url": self.world.nats.url, "sync_address": self.world.sync.address}
        self.explorers[name] = MemberProcess(
            name, self.folder / name, {}, self.world.engine, config_file=self.config, transports="folder",
            drain_seconds=0.2, **addresses, **self.settings,
        ).start()  # fmt: skip

    def until_counted(self, *counts: int) -> None:
        """Until there were so many, one after the other, since the last time."""

        def holds() -> bool:
            left = list(counts)
            for count in self.counts:
                if left and count == left[0]:
                    left.pop(0)
            return not left

        self.until(holds, 240, f"{counts} explorers, one after the other; there were {self.counts}")
        del self.counts[:-1]

    def end(self) -> None:
        self._over.set()
        self._polls.join(60)
        super().end()


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScaledRun]:
    with World(tmp_path_factory.mktemp("scaled")) as world:
        made = ScaledRun(world, "scaled")
        try:
            yield made
        finally:
            made.end()


def test_explorers_are_as_many_as_the_work_needs(run: ScaledRun) -> None:
    run.open()
    run.until_counted(1, 4, 1)
    run.until(lambda: run.stats().stored == BURST, 120, "the first tasks are stored")
    run.train_to(STEPS // 2)
    run.until_counted(1, 4, 1)
    run.train_to(STEPS)
    assert set(run.codes) == {0}
    stats = run.stats()
    assert (stats.fed, stats.stored, stats.dead_letters) == (STEPS * GROUPS, STEPS * GROUPS, 0)
    assert run.finish() == []
