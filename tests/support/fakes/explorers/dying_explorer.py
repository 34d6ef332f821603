"""An explorer without an engine, in the test's own process, that dies at a reply; and its tasks, in a corridor."""

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import Any

import numpy as np

from support.fakes.explorers.toolbox import Corridor, Toolbox, make_episode_task, split_reply
from trinity.data.experience import AttemptFailure, Experience, Group, Limits, SamplingParams, Task, VersionSpan
from trinity.explorer.environments.client import EnvironmentClient
from trinity.explorer.environments.types import EnvironmentFailed
from trinity.explorer.journal import journal
from trinity.explorer.journal.journal import EpisodeJournal, Journals, current_episode
from trinity.explorer.rollout import attempt
from trinity.explorer.types import Completion
from trinity.explorer.workflows import seeds
from trinity.runtime.broker import Broker
from trinity.runtime.names import RunNames

RUN = RunNames("tests-run-000000")
LENGTH = 6  # of the corridor, in turns


class Explorer(Toolbox):
    """One explorer: its journals, and a policy that walks right.

    It gives no reply from number `dies_at` on, and dies when all its rollouts wait for one, their turns written.
    """

    def __init__(
        self,
        broker: Broker,
        name: str,
        environment: Any = Corridor,
        dies_at: int = 10**9,
        rollouts: int = 1,
        flush: int = 0,
        client: EnvironmentClient | None = None,
    ) -> None:
        """`client` calls the providers that play its episodes. None calls `environment` directly."""
        super().__init__(lambda turns: "right", {"corridor": environment})
        self.asked, self.first_asked, self.dies_at = 0, 0, dies_at
        self.withdrawn: set[int] = set()
        self.waited_for: list[int] = []
        self.died, self.rollouts = asyncio.Event(), rollouts
        self.name = name
        self.journals = Journals(
            broker, RUN, name, Limits(10_000, 0), lambda version: version not in self.withdrawn, self._reaches, flush
        )
        self.reachable = True
        self._client = client

    def episode(self, environment: str, task: dict[str, Any], args: dict[str, Any], seed: int) -> Any:
        if self._client is None:
            return super().episode(environment, task, args, seed)
        return self._client.episode(environment, task, args, seed)

    async def _reaches(self, version: int) -> bool:
        self.waited_for.append(version)
        return self.reachable

    def journal(self) -> EpisodeJournal | None:
        return current_episode(seeds.place())

    async def until_served(self, failure: EnvironmentFailed) -> None:
        pass

    async def generate(self, prompt_token_ids: Any, sampling: SamplingParams, images: Any = ()) -> list[Completion]:
        self.asked += 1
        self.first_asked = self.first_asked or len(prompt_token_ids)
        if self.asked >= self.dies_at:
            kept = journal._journal.get()
            if kept is not None:
                await kept.settle()
            self.rollouts -= 1
            if not self.rollouts:
                self.died.set()
            await asyncio.Event().wait()
        head, known = split_reply(prompt_token_ids)
        (whole,) = await super().generate(head, replace(sampling, max_tokens=1000), images)
        assert whole.token_ids[: len(known)].tolist() == known
        ids = whole.token_ids[len(known) :][: sampling.max_tokens]
        reason = "stop" if len(known) + len(ids) == len(whole.token_ids) else "length"
        spans = (VersionSpan(self.version, 0, len(ids)),)
        made = [Completion(ids, np.zeros(len(ids), np.float32), spans, reason)]
        # What each explorer samples can be told by its log-probabilities.
        mark = -float(len(self.name))
        return [replace(one, logprobs=np.full(len(one.token_ids), mark, np.float32)) for one in made]

    async def explore(self, task: Task, number: int) -> Group | AttemptFailure:
        """Runs in a separate asyncio task, like each delivery."""
        work = attempt.explore(task, number, self.name, self, journals=self.journals)  # type: ignore[arg-type]
        outcome = await asyncio.create_task(work)
        assert isinstance(outcome, Group | AttemptFailure)
        return outcome

    async def explore_and_die(self, task: Task, number: int) -> None:
        """Drops all waiting writes, like kill -9."""
        working = asyncio.create_task(self.explore(task, number))
        await asyncio.wait_for(self.died.wait(), 5)
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working


def the_task(n: int = 1, ordinal: int = 1, **changes: Any) -> Task:
    args = json.dumps({"environment": "corridor", **changes.pop("args", {})})
    row = json.dumps({"length": LENGTH})
    made = make_episode_task(args, n, row_json=row, ordinal=ordinal, workflow="environment_workflow", **changes)
    return replace(made, run=RUN.run, task_id=f"corridor/0/{ordinal}")


def only(group: Group | AttemptFailure) -> Experience:
    assert isinstance(group, Group), group
    (experience,) = group.experiences
    return experience


def info(experience: Experience) -> Any:
    return json.loads(experience.info_json or "{}")
