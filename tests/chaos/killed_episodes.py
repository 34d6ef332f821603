"""A run of the buffer whose explorers are killed with SIGKILL while they play episodes of ten turns."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from support.fakes.environments.gusts import plugin
from support.programs.playing_explorer import Given
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from support.servers.service import ServiceProcess
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.data.experience import Group
from trinity.data.wire import decode_outcome
from trinity.reading.client import Buffer
from trinity.runtime import rpc
from trinity.runtime.broker import connect, ensure_consumer
from trinity.runtime.names import TASKS_CONSUMER, RunNames
from trinity.runtime.trust.roles import Role
from trinity.ui.audit import Audit, count_problems

TURNS = 10
LAKE = ["SFFF", "FFFF", "FFFF", "FFFG"]  # without holes, so that few episodes end before their tenth turn
WORKFLOWS: dict[str, dict[str, Any]] = {
    "frozen_lake_workflow": {"environment_args": {"is_slippery": True}},
    "environment_workflow": {"environment": "gusts", "action_form": "action"},
}
LEASE_SECONDS = 1.5
STEPS = 2
_RUN_SECONDS = 540.0


@dataclass
class Played:
    """`groups` by task, `replies`: how often each was sampled, by task, rollout and what it answers; `kills`: the
    turn (from 0) that each killed explorer began last; `problems` of the ledger; `acted`: how often each step of each
    episode in gusts was done."""

    groups: dict[str, Group]
    replies: Counter[tuple[str, str, str]]
    kills: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)
    tokens_again: Counter[str] = field(default_factory=Counter)
    environment_kills: int = 0
    acted: Counter[str] = field(default_factory=Counter)

    @property
    def deaths(self) -> dict[str, int]:
        """Number of explorers that were killed at each task, or otherwise ended its lease."""
        return {task: group.attempt - 1 for task, group in self.groups.items()}

    @property
    def sampled_again(self) -> Counter[tuple[str, str]]:
        """Turns that were sampled more often than once, by task and rollout."""
        again: Counter[tuple[str, str]] = Counter()
        for (task, place, _), times in self.replies.items():
            again[task, place] += times - 1
        return +again

    def beyond(self, turns: int) -> Counter[tuple[str, str]]:
        """Replies of episodes with this number of turns beyond these, by task and rollout, of any answer."""
        sampled: Counter[tuple[str, str]] = Counter()
        for (task, place, _), times in self.replies.items():
            sampled[task, place] += times
        return Counter({name: times - turns for name, times in sampled.items()})

    @property
    def episodes(self) -> int:
        return sum(len(group.experiences) for group in self.groups.values())

    @property
    def places(self) -> list[dict[str, Any]]:
        """Turns at which another explorer continued an episode."""
        infos = (json.loads(e.info_json or "{}") for group in self.groups.values() for e in group.experiences)
        return [move for info in infos for move in info.get("moved", [])]

    @property
    def moves(self) -> int:
        """Number of times that another explorer continued an episode."""
        return len(self.places)


async def play(
    folder: Path,
    nats: NatsServer,
    *,
    tasks: int,
    rollouts: int = 2,
    kills: int = 0,
    environment_kills: int = 0,
    explorers: int = 3,
    durable: bool = True,
    seed: int = 0,
    reply_seconds: float = 0.2,
    flush_tokens: int = 0,
    workflow: str = "frozen_lake_workflow",
    branches: dict[str, Any] | None = None,
    kill_at: float | None = None,
) -> Played:
    """All groups of `tasks` tasks, while explorers are killed `kills` times, and their environment's service
    `environment_kills` times. `reply_seconds`: of each part of a reply, which has `flush_tokens`. `branches`: turns
    at which episodes branch. `kill_at`: the share of a reply's seconds after which its explorer is killed, None for a
    random one."""
    data = folder / "data"
    data.mkdir(parents=True)
    (data / "train.jsonl").write_text((json.dumps({"desc": LAKE}) + "\n") * 50)
    (folder / "plugins").mkdir()
    (folder / "plugins/gusts_of_tests.py").write_text(plugin(folder / "steps"))
    taskset = {"name": "walks", "path": str(data), "split": "train", "default_workflow_type": workflow}
    taskset["workflow_args"] = WORKFLOWS[workflow] | ({"branches": branches} if branches else {})
    run = BufferRun(
        folder,
        nats,
        steps=STEPS,
        groups=tasks // STEPS,
        algorithm={"repeat_times": rollouts},
        model={"max_prompt_tokens": 4000, "max_response_tokens": 64, "max_model_len": 20_000},
        buffer={"explorer_input": {"taskset": taskset}},
    ).start()
    environment = ServiceProcess("environment", folder, PLUGIN_DIRS=str(folder / "plugins")).start()
    trainer = run.trainer()
    crowd = _Crowd(folder, nats, run, environment, durable, reply_seconds, flush_tokens)
    try:
        await trainer.begin()
        async with asyncio.timeout(_RUN_SECONDS), await connect(nats.url, "tests") as broker:
            names = RunNames(run.run)
            await ensure_consumer(broker, names.tasks_stream, TASKS_CONSUMER, lease_seconds=LEASE_SECONDS)
            crowd.start(explorers)
            async with asyncio.TaskGroup() as beside:
                work = [crowd.kill(kills, random.Random(seed), kill_at), crowd.watch()]
                work.append(crowd.kill_environment(environment_kills, random.Random(seed + 1)))
                running = [beside.create_task(one) for one in work]
                batches = [await trainer.batch(step, _RUN_SECONDS) for step in range(1, STEPS + 1)]
                for task in running:
                    task.cancel()
            groups = [one for batch in batches for one in _groups(batch)]
            played = Played({group.task.task_id: group for group in groups}, crowd.replies(), crowd.killed)
            if (folder / "steps").exists():
                played.acted.update((folder / "steps").read_text().splitlines())
            played.tokens_again, played.environment_kills = crowd.tokens_again(), crowd.environment_killed
            async with rpc.channel(run.buffer.address) as channel:
                played.counts, played.problems = await _audited(Buffer(channel, run.run))
            while kept := await broker.subjects(names.turns_stream):  # the buffer removes them in its next look
                assert durable, kept
                await asyncio.sleep(0.1)
        return played
    finally:
        crowd.stop()
        await trainer.close()
        environment.kill()
        run.stop()


async def _audited(buffer: Buffer) -> tuple[dict[str, Any], list[str]]:
    counts, audit = await buffer.counts(), Audit()
    for step in range(1, counts["ledger_step"] + 1):
        audit.read(*await buffer.accounted_entry(step))
    return counts, [str(problem) for problem in (*count_problems(counts), *audit.problems())]


def _groups(parts: list[bytes]) -> list[Group]:
    read = [pb.BatchPart.FromString(part) for part in parts]
    outcomes = [decode_outcome(part.group.outcome) for part in read if part.WhichOneof("part") == "group"]
    return [one for one in outcomes if isinstance(one, Group)]


class _Crowd:
    """Explorer processes. A killed explorer is replaced by a new one with another name."""

    def __init__(
        self,
        folder: Path,
        nats: NatsServer,
        run: BufferRun,
        environment: ServiceProcess,
        durable: bool,
        reply_seconds: float,
        flush_tokens: int,
    ) -> None:
        self._nats, self._run, self._folder, self._environment = nats, run, folder, environment
        self._given = Given(
            nats.url,
            "",
            run.run,
            "",
            environment.address,
            str(folder / "sampled.jsonl"),
            reply_seconds,
            LEASE_SECONDS,
            durable,
            flush_tokens=flush_tokens,
        )
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._number = 0
        self.killed: list[int] = []
        self.environment_killed = 0

    def start(self, number: int = 1) -> None:
        for _ in range(number):
            self._number += 1
            name = f"player{self._number}"
            creds = self._nats.settings(Role.EXPLORER, self._run.run, name).get("NATS_CREDS", "")
            given = replace(self._given, name=name, creds=creds)
            with (self._folder / f"{name}.out").open("wb") as out:
                command = [sys.executable, "-m", "support.programs.playing_explorer", json.dumps(asdict(given))]
                environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
                self._running[name] = subprocess.Popen(command, stdout=out, stderr=out, env=environment)

    async def watch(self) -> None:
        """Until cancelled. AssertionError: an explorer ended by itself, with its output."""
        while True:
            self._check()
            await asyncio.sleep(0.2)

    async def kill(self, times: int, chance: random.Random, at: float | None) -> None:
        """After a random number of replies, the explorer that samples the last one, at this share of its seconds."""
        for _ in range(times):
            lines = await self._further(chance.randint(1, 2 * TURNS if at is None else TURNS // 2))
            await asyncio.sleep((chance.random() if at is None else at) * self._given.reply_seconds)
            last = lines[-1]["by"]
            process = self._running.pop(last)
            process.send_signal(signal.SIGKILL)
            process.wait()
            self.killed.append(lines[-1]["turn"])
            self.start()

    async def kill_environment(self, times: int, chance: random.Random) -> None:
        """At a random moment, with all episodes that are open; it starts again at once, at the same address."""
        for _ in range(times):
            await self._further(chance.randint(TURNS, 4 * TURNS))
            await asyncio.sleep(chance.random() * self._given.reply_seconds)
            self._environment.kill()
            self.environment_killed += 1
            self._environment.start(wait_seconds=0)

    async def _further(self, replies: int) -> list[dict[str, Any]]:
        """All lines, once there are this many more."""
        wanted = len(self._lines()) + replies
        while len(lines := self._lines()) < wanted:
            await asyncio.sleep(0.01)
        return lines

    def _check(self) -> None:
        assert self._environment.is_running(), self._environment.tail()
        for name, process in self._running.items():
            assert process.poll() is None, (self._folder / f"{name}.out").read_text()

    def _lines(self) -> list[dict[str, Any]]:
        path = Path(self._given.sampled)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written

    def replies(self) -> Counter[tuple[str, str, str]]:
        return Counter((line["task"], line["place"], line["prompt"]) for line in self._lines())

    def tokens_again(self) -> Counter[str]:
        """Tokens that were sampled more often than once, by task."""
        seen: set[tuple[str, str, str]] = set()
        again: Counter[str] = Counter()
        for line in self._lines():
            asked = line["task"], line["place"], line["prompt"]
            again[line["task"]] += line["tokens"] if asked in seen else 0
            seen.add(asked)
        return +again

    def stop(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()
