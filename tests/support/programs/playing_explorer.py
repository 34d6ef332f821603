"""An explorer without an engine, as a process that may be killed: real leases, attempts, journals and environment.

Its policy is a function of the conversation and of the rollout's place, and writes down each reply before it gives it.
"""

import asyncio
import hashlib
import json
import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from support.fakes.explorers.toolbox import Toolbox, split_reply, turns
from trinity.data.experience import Limits, SamplingParams, VersionSpan
from trinity.explorer.environments.client import EnvironmentClient
from trinity.explorer.environments.types import EnvironmentFailed
from trinity.explorer.journal.journal import EpisodeJournal, Journals, current_episode
from trinity.explorer.rollout import attempt, task_queue
from trinity.explorer.rollout.loop import Progress, RolloutLoop
from trinity.explorer.types import Completion
from trinity.explorer.workflows import seeds
from trinity.runtime.broker import connect
from trinity.runtime.names import RunNames

MOVES = ("Left", "Down", "Right", "Up", "Right", "Down")  # a little more often towards the goal


@dataclass(frozen=True)
class Given:
    """Arguments of a process. `sampled`: file of the replies; `lease_seconds`: of a task."""

    url: str
    creds: str
    run: str
    name: str
    environment: str
    sampled: str
    reply_seconds: float
    lease_seconds: float
    durable: bool
    slots: int = 1
    flush_tokens: int = 0


class Policy(Toolbox):
    """Plays at the environment service."""

    def __init__(self, given: Given) -> None:
        super().__init__(lambda _: "", max_model_tokens=20_000)
        self._given = given
        self._client = EnvironmentClient(given.environment)
        self._file = os.open(given.sampled, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def journal(self) -> EpisodeJournal | None:
        return current_episode(seeds.place())

    def episode(self, environment: str, task: dict[str, Any], args: dict[str, Any], seed: int) -> Any:
        return self._client.episode(environment, task, args, seed)

    async def until_served(self, failure: EnvironmentFailed) -> None:
        await self._client.until_served(failure)

    async def generate(self, prompt_token_ids: Any, sampling: SamplingParams, images: Any = ()) -> list[Completion]:
        place = seeds.place()
        head, known = split_reply(prompt_token_ids)
        prompt = np.asarray(prompt_token_ids, np.int64).tobytes()
        drawn = hashlib.blake2b(np.asarray(head, np.int64).tobytes() + place.encode(), digest_size=2).digest()
        self._policy = lambda _: f"<action>{MOVES[drawn[0] % len(MOVES)]}</action>"
        (whole,) = await super().generate(head, replace(sampling, max_tokens=1000))
        ids = whole.token_ids[len(known) :][: sampling.max_tokens]
        reason = "stop" if len(known) + len(ids) == len(whole.token_ids) else "length"
        made = Completion(ids, np.full(len(ids), -0.5, np.float32), (VersionSpan(0, 0, len(ids)),), reason)
        prompt_name = hashlib.blake2b(prompt, digest_size=8).hexdigest()
        turn = sum(role == "assistant" for role, _ in turns(prompt_token_ids)) - 1
        said = {"turn": turn, "by": self._given.name, "task": TASK.get(), "place": place, "prompt": prompt_name}
        os.write(self._file, (json.dumps({**said, "tokens": len(made.token_ids)}) + "\n").encode())
        await asyncio.sleep(self._given.reply_seconds)
        return [made]


class _Task:
    """The task of the running attempt, for the file."""

    def get(self) -> str:
        current = seeds._attempt.get()
        return current.task_id if current is not None else ""


TASK = _Task()


class Weights:
    falls_short = False

    async def reaches_step(self, step: int) -> bool:
        return True

    async def notify(self) -> None:
        pass


async def explore(given: Given) -> None:
    """Until it is killed."""
    task_queue.TASK_LEASE_SECONDS = given.lease_seconds  # type: ignore[attr-defined]
    names, weights, tools = RunNames(given.run), Weights(), Policy(given)
    creds = Path(given.creds) if given.creds else None
    async with await connect(given.url, given.name, creds=creds) as broker:
        limits = Limits(20_000, 0)
        journals = None
        if given.durable:
            usable, flush = lambda version: True, given.flush_tokens
            journals = Journals(broker, names, given.name, limits, usable, weights.reaches_step, flush)
        work = partial(attempt.explore, explorer_id=given.name, tools=tools, limits=limits, journals=journals)
        await RolloutLoop(broker, names, given.slots, work, weights, weights.notify, Progress()).run()


if __name__ == "__main__":
    asyncio.run(explore(Given(**json.loads(sys.argv[1]))))
