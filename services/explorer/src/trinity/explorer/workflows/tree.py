"""Plays the rollouts of a group as trees: episodes branch at some turns, and branches share the turns before.

A branch continues a copy of the conversation, in an environment that is restored to the same state or, if it is
deterministic, is given the same actions. The rollouts of the group are the leaves. Of each branching the first branch
is the episode itself, which trains the shared turns. Rollouts for which an episode ends too early are played from the
start.
"""

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from trinity.explorer.environments.types import EnvironmentCause, EnvironmentFailed
from trinity.explorer.journal.journal import Continued
from trinity.explorer.workflows.base import rollouts_group
from trinity.explorer.workflows.episode import Branching, Episode
from trinity.explorer.workflows.player import Player
from trinity.explorer.workflows.seeds import numbered
from trinity.runtime.errors import InvalidInput


@dataclass
class _Branch:
    """An episode, its environment and the environment's last answer. `leaves`: rollouts at or below it."""

    episode: Episode
    remote: Any
    answer: Any
    leaves: range
    branchings: int  # on its path

    async def step(self, action: str) -> Any:
        """Send an action to the environment, and keep its answer."""
        self.answer = await self.remote.step(action)
        return self.answer


class Tree:
    """The trees of one group."""

    def __init__(self, player: Player, rollouts: int) -> None:
        self._player, self._branches, self._rollouts = player, player.rules.branches, rollouts
        self._played: dict[int, Episode] = {}
        self._group: asyncio.TaskGroup

    async def play(self) -> list[Episode]:
        """The episode of each rollout. Raises as Player.play does, and InvalidInput if episodes cannot branch."""
        roots = -(-self._rollouts // self._branches.width**self._branches.depth)
        async with rollouts_group() as self._group:
            for leaves in _parts(range(self._rollouts), roots):
                self._start(leaves)
        return [self._played[rollout] for rollout in range(self._rollouts)]

    def _start(self, leaves: range, begun: Episode | None = None, answer: Any = None) -> None:
        self._group.create_task(numbered(leaves[0], self._play(leaves, begun, answer)))

    async def _play(self, leaves: range, begun: Episode | None, answer: Any) -> None:
        """Play an episode to its end: from the start, or a copy of another from its last answer on."""
        player, journal = self._player, self._player.journal()
        with player.counting() as counted:
            async with player.episode() as opened:
                remote = opened if journal is None else Continued(opened, journal)
                if begun is None:
                    answer = await remote.reset(keep_states=True)
                    begun = player.begin(answer)
                else:
                    await _catch_up(remote, begun, answer)
                if not remote.snapshots and not remote.deterministic:
                    what = f"{player.rules.environment} announces neither snapshots nor deterministic"
                    raise InvalidInput("workflow_args.branches", f"is set, and {what}; leave it out")
                counted.episode, begun.journal = begun, journal
                branch = _Branch(begun, remote, answer, leaves, begun.branching.number if begun.branching else 0)
                while branch.episode.end is None:
                    await self._turn(branch)
        self._played[leaves[0]] = begun
        for leaf in branch.leaves[1:]:
            self._start(range(leaf, leaf + 1))

    async def _turn(self, branch: _Branch) -> None:
        """Play a turn of the episode, which branches before it where the rule says so."""
        episode, answer = branch.episode, branch.answer
        number = len(episode.turns)
        able = number > episode.shared_turns and branch.branchings < self._branches.depth and len(branch.leaves) > 1
        able &= bool(branch.remote.deterministic or answer.state)
        before = episode.branched(Branching(branch.leaves[0], number, branch.branchings + 1)) if able else None
        if number in self._branches.turns and before is not None:
            self._fork(branch, before, answer)
        await self._player.turn(episode, branch)
        least = self._branches.entropy  # estimated by the mean surprisal of the last reply's tokens
        uncertain = least is not None and -float(episode.completions[-1].logprobs.mean()) >= least
        if uncertain and before is not None:
            self._fork(branch, before, answer)
        if episode.end is None:
            self._player.tell(episode)

    def _fork(self, branch: _Branch, before: Episode, answer: Any) -> None:
        """Play the other branches from `before`, and leave the first one's rollouts to the episode itself."""
        branch.leaves, *others = _parts(branch.leaves, min(self._branches.width, len(branch.leaves)))
        branch.branchings += 1
        if branch.episode.journal is not None:
            branch.episode.journal.branched(answer)
        for leaves in others:
            assert before.branching is not None
            self._start(leaves, before.branched(before.branching), answer)


async def _catch_up(remote: Any, begun: Episode, answer: Any) -> None:
    """Bring an environment to the last answer to the turns so far. Raises EnvironmentFailed."""
    sent = [turn for turn in begun.turns if not turn.problem]
    if answer.state:
        await remote.restore(answer, sum(turn.reward for turn in sent))
        return
    found = await remote.reset(keep_states=True)
    for turn in sent:
        found = await remote.step(turn.action)
    if sent and found.observation != begun.answered:
        what = f"{begun.rules.environment} is announced as deterministic, and answers the same actions otherwise"
        raise EnvironmentFailed(what, EnvironmentCause.CONTRACT_VIOLATION)


def _parts(leaves: range, count: int) -> list[range]:
    """Divides rollouts into `count` runs whose lengths differ by at most one."""
    ends = [leaves.start + index * len(leaves) // count for index in range(count + 1)]
    return [range(first, end) for first, end in pairwise(ends)]
