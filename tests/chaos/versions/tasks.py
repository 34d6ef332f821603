"""A WeightsRun with tasks: a real buffer feeds its members and writes the ledger, and a trainer takes the batches."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np

from chaos.versions.audit import Given, Records
from chaos.versions.run import Violated, WeightsRun
from chaos.versions.world import World
from support.checks.audit import messages
from support.servers.service import ServiceProcess
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.buffer.v1 import buffer_pb2_grpc
from trinity.api.common.v1 import experience_pb2
from trinity.data.experience import Group
from trinity.data.wire import decode_outcome
from trinity.runtime.broker import connect
from trinity.runtime.names import RunNames

GROUPS, REPEAT = 4, 2
_BATCH_SECONDS = 180.0  # longer than the lease of a task, 30 s, more than once


class TaskRun(WeightsRun):
    """`train_to` takes batches and makes a version of each step. Explorers may be `ahead` steps ahead."""

    def __init__(self, world: World, name: str, *, steps: int, ahead: int, response: int) -> None:
        super().__init__(
            world,
            name,
            model={"max_response_tokens": response},
            algorithm={"repeat_times": REPEAT},
            buffer={"batch_size": GROUPS, "total_steps": steps},
            synchronizer={"sync_interval": 1, "sync_offset": ahead},
            explorer={"runner_per_model": 3, "eval_interval": 1000},
        )
        self.steps, self.trained = steps, 0
        settings = {"CONFIG_FILE": str(self.config), "NATS_URL": world.nats.url, "LOG_GIB": "0.05", "LOG_KEEP_GIB": "0"}
        self.buffer = ServiceProcess("buffer", self.folder, **settings)

    def open(self, *members: str) -> "TaskRun":
        self.buffer.start()
        self.settings["environment_address"] = self.world.environment.address
        super().open(*members)
        return self

    def train_to(self, step: int) -> None:
        while self.trained < step:
            self.trained += 1
            self._take(self.trained)
            self.publish()

    def _take(self, step: int) -> list[bytes]:
        """The groups of the batch of a step, whole."""
        groups = []
        with self._ask_buffer() as stub:
            request = pb.StreamBatchesRequest(run=self.run, from_step=step)
            parts = stub.StreamBatches(request, timeout=_BATCH_SECONDS)
            for part in parts:
                if part.WhichOneof("part") == "group":
                    groups.append(part.group.outcome)
                if part.WhichOneof("part") == "end":
                    parts.cancel()  # otherwise the next batches would count as requested
                    return groups
        raise Violated(f"the batch of step {step} did not come")

    def stats(self) -> pb.StatsResponse:
        with self._ask_buffer() as stub:
            return stub.Stats(pb.StatsRequest(run=self.run), timeout=20)

    def ledger(self) -> list[pb.LedgerEntry]:
        """Every entry there is."""
        with self._ask_buffer() as stub:
            last = stub.Stats(pb.StatsRequest(run=self.run), timeout=20).ledger_step
            request = [pb.GetLedgerEntryRequest(run=self.run, step=step) for step in range(1, last + 1)]
            return [stub.GetLedgerEntry(one, timeout=20).entry for one in request]

    @contextlib.contextmanager
    def _ask_buffer(self) -> Any:
        with grpc.insecure_channel(self.buffer.address) as channel:
            yield buffer_pb2_grpc.BufferServiceStub(channel)

    def stored(self) -> dict[int, Group]:
        """Every group in the log, by its sequence there."""
        found = {}
        for message in asyncio.run(self._log()):
            if experience_pb2.Outcome.FromString(message.data).WhichOneof("outcome") == "group":
                group = decode_outcome(message.data)
                assert isinstance(group, Group)
                found[message.sequence] = group
        return found

    async def _log(self) -> Sequence[Any]:
        async with asyncio.timeout(60), await connect(self.world.nats.url, "judge") as broker:
            return await messages(broker, RunNames(self.run).experiences_stream)

    def records(self) -> Records:
        """With all that is stored."""
        records = super().records()
        for group in self.stored().values():
            for e in group.experiences:
                prompt, tokens = e.token_ids[: e.prompt_length].tolist(), e.token_ids[e.prompt_length :].tolist()
                records.given.append(Given(prompt, tokens, np.asarray(e.logprobs), e.version_spans))
        return records

    def finish(self) -> list[str]:
        """Also: every task ended once, and every step was trained once."""
        found, stats, ledger = super().finish(), self.stats(), self.ledger()
        if stats.fed != stats.stored + stats.dead_letters + stats.outstanding or stats.dead_letters:
            counts = f"{stats.stored} stored, {stats.dead_letters} dead, {stats.outstanding} outstanding"
            found.append(f"fed {stats.fed}: {counts}")
        if [entry.step for entry in ledger] != list(range(1, self.steps + 1)):
            found.append(f"the ledger has the steps {[entry.step for entry in ledger]} of {self.steps}")
        used = Counter(group.task_id for entry in ledger for group in entry.groups)
        return found + [f"task {task} is in the ledger {times} times" for task, times in used.items() if times > 1]

    def end(self) -> None:
        super().end()
        self.buffer.kill()
