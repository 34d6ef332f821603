"""Cases on three nats-servers, of which one dies: streams and buckets have three replicas. See striking.py."""

import asyncio
import random
import time
from typing import Any

from chaos.striking import case
from chaos.versions.run import check
from chaos.versions.tasks import GROUPS, TaskRun
from chaos.versions.world import World
from chaos.weight_cases import ALL
from support.servers.nats import NatsCluster, NatsServer
from trinity.runtime.broker import connect
from trinity.runtime.names import RunNames

STEPS, AHEAD = 16, 1
MOST_SECONDS = 10.0


class ClusterRun(TaskRun):
    """A trainer whose batches are noted, with the time of each: `taken` and `at`, by step."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name, steps=STEPS, ahead=AHEAD, response=40)
        self.taken: dict[int, list[bytes]] = {}
        self.at: dict[int, float] = {}

    @property
    def nodes(self) -> list[NatsServer]:
        assert isinstance(self.world.nats, NatsCluster)
        return self.world.nats.nodes

    def _take(self, step: int) -> list[bytes]:
        groups = super()._take(step)
        self.taken[step], self.at[step] = groups, time.monotonic()
        return groups

    def publish(self, limit: float = 0.0, **how: Any) -> int:
        """Its time is part of the gap between two batches."""
        return super().publish(limit or 6 * MOST_SECONDS, **how)

    def again(self, step: int) -> list[bytes]:
        """The batch as the buffer serves it now, to a trainer that resumes."""
        return super()._take(step)

    def leader_of(self, stream: str) -> NatsServer:
        leader = asyncio.run(self._leader(stream))
        return next(node for node in self.nodes if node.folder.name == leader)

    async def _leader(self, stream: str) -> str:
        async with asyncio.timeout(60), await connect(self.world.nats.url, "judge") as broker:
            info: Any = await broker.request(lambda: broker.js.stream_info(stream), stream)
            check(info.config.num_replicas == len(self.nodes), f"{stream} has {info.config.num_replicas} replicas")
            return str(info.cluster.leader)


@case("one of three NATS servers is killed: no step has other groups than before, and none takes 10 s",
      open=ClusterRun, cluster=True)  # fmt: skip
def nats_server_killed(run: ClusterRun, chance: random.Random) -> None:
    names = RunNames(run.run)
    run.open(*ALL)
    run.train_to(2)
    streams = (names.experiences_stream, names.tasks_stream, names.batches_stream, "KV_trinity_versions")
    victim = run.leader_of(chance.choice(streams))  # the costliest: others are followers of that stream
    run.until(lambda: run.stats().outstanding > 0, 20, "explorers have tasks")
    time.sleep(chance.uniform(0, 0.3))
    victim.kill()
    try:
        run.train_to(STEPS - 4)
    finally:
        victim.start()
    run.train_to(STEPS)
    for step in range(2, STEPS + 1):
        seconds = run.at[step] - run.at[step - 1]
        check(seconds <= MOST_SECONDS, f"step {step} came {seconds:.1f} s after the one before")
    for step, groups in run.taken.items():
        check(len(groups) == GROUPS, f"step {step} has {len(groups)} groups")
        check(run.again(step) == groups, f"step {step} has other groups when it is asked for again")
    stored = run.stored()
    for entry in run.ledger():
        check(all(group.log_sequence in stored for group in entry.groups), f"step {entry.step} has lost a group")
