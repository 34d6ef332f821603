"""Games of several players. The policy plays some seats, older versions of it or auxiliary models the others.

    Table: reset -> the player whom the environment names acts -> ... -> done
    Seat:  one player's view of the table: an episode with its own reset and step

So each seat has its own conversation, and sees what the environment shows it at its turns. The seats of the policy
become experiences, compared with the same seat in the other rollouts of the group. Nothing else is trained.
"""

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from trinity.config.workflows import OLDER, POLICY, GameRules
from trinity.data.experience import Experience, Task
from trinity.explorer.chat import Message
from trinity.explorer.journal.journal import EpisodeJournal
from trinity.explorer.workflows.base import Toolbox, gather_rollouts, rollouts_group
from trinity.explorer.workflows.environments import EnvironmentWorkflow
from trinity.explorer.workflows.episode import End, Episode
from trinity.explorer.workflows.player import Player, parse_action
from trinity.runtime.errors import InvalidInput, TrinityError
from trinity.sdk.contract import Answer


class Table:
    """One game. Each answer of the environment goes to the seat of the player whom it names, the last one to all."""

    def __init__(self, remote: Any, players: Sequence[str], instructions: str) -> None:
        self._remote, self.instructions = remote, instructions
        self.seats = {player: Seat(self, player) for player in players}
        self.rewards: dict[str, float] = dict.fromkeys(players, 0.0)
        self.left = ""  # the player whom a rule of the workflow took out of the game
        self._over = False

    def show(self, answer: Any) -> None:
        """Pass an answer on."""
        for player, reward in answer.rewards.items():
            self.rewards[player] += reward
            self.seats[player].earned += reward
        self._over = answer.done
        for seat in self.seats.values() if answer.done else [self.seats[answer.player]]:
            seat.answers.put_nowait(answer)

    async def act(self, player: str, action: str) -> None:
        answer = await self._remote.step(action)
        self.seats[player].metrics = dict(answer.metrics)
        self.show(answer)

    def leave(self, player: str) -> None:
        """A rule of the workflow ended this player's episode, and with it the game. The others keep their rewards."""
        if not self._over:
            self.left = player
            self.show(Answer(f"The game is over: {player} ended it.", done=True))


class Seat:
    """One player's episode. A step waits for the player's next turn. `earned`: rewards since the player's last one."""

    def __init__(self, table: Table, player: str) -> None:
        self._table, self.player = table, player
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.earned, self.metrics = 0.0, dict[str, float]()

    async def reset(self) -> Answer:
        first = await self._turn()
        return replace(first, info_json=json.dumps({"instructions": self._table.instructions, **first.info}))

    async def step(self, text: str) -> Answer:
        await self._table.act(self.player, text)
        return await self._turn()

    def leave(self) -> None:
        self._table.leave(self.player)

    async def _turn(self) -> Answer:
        answer = await self.answers.get()
        earned, self.earned = self.earned, 0.0
        return Answer(
            answer.observation, earned, answer.done, answer.info_json, self.metrics, images=tuple(answer.images)
        )


class NoTurn(TrinityError):
    """All games of a group ended before the policy acted. Another attempt may play others."""


class PlayersWorkflow(EnvironmentWorkflow):
    """Plays `repeat_times` games. Each seat of the policy that had a turn gives an experience, or one for each turn."""

    rules: ClassVar[GameRules] = GameRules()

    def __init__(self, task: Task, tools: Toolbox) -> None:
        super().__init__(task, tools)
        assert isinstance(self.player.rules, GameRules)
        self._rules = self.player.rules
        self._older: tuple[int, Player] | None = None

    async def run(self) -> list[Experience]:
        if OLDER in self._rules.seats.values():  # one for the whole group, whose rollouts are compared
            version, tools = await self.tools.older(self.task.task_id)
            self._older = version, Player(self.task, tools, self._rules)
        games = (self._play(rollout) for rollout in range(self.task.repeat_times))
        found = [experience for made in await gather_rollouts(games) for experience in made]
        if not found:
            raise NoTurn(f"no seat of the policy had a turn in {self.task.repeat_times} game(s)")
        return found

    async def _play(self, rollout: int) -> list[Experience]:
        async with self.player.episode() as remote:
            first = await remote.reset()
            seating = self._seating(remote.players, rollout)
            # The next holder of the lease could not have replies of others played again.
            replayed = remote.deterministic and {*seating.values()} == {POLICY}
            journals = {player: self.player.journal() if replayed else None for player in seating}
            names = {player: self._name(who) for player, who in seating.items()}
            table = Table(remote, remote.players, str(first.info.get("instructions") or ""))
            async with rollouts_group() as group:
                playing = {
                    player: group.create_task(self._play_seat(table.seats[player], who, journals[player]))
                    for player, who in seating.items()
                }
                table.show(first)
        played = {player: one for player, task in playing.items() if (one := task.result()) is not None}
        rewards = {player: played[player].reward if player in played else table.rewards[player] for player in seating}
        made: list[Experience] = []
        for index, (player, who) in enumerate(seating.items()):
            if who == POLICY and played[player].turns:
                number = rollout * len(seating) + index
                ranked = {**rewards, table.left: -math.inf} if table.left else rewards
                scores = self._scores(player, ranked, seating)
                facts = {"group": player, "player": player, "seats": names}
                made += [_with(one, facts, scores) for one in self.experiences(played[player], number)]
        return made

    def _seating(self, players: Sequence[str], rollout: int) -> dict[str, str]:
        """Maps each player to its seat. Raises InvalidInput for seats that do not fit the environment."""
        if found := self._rules.seats_problem(players):
            argument, problem = found
            raise InvalidInput(f"workflow_args.{argument}", problem)
        seats = [self._rules.seats.get(player, POLICY) for player in players]
        moved = rollout % len(seats) if self._rules.rotate else 0
        return dict(zip(players, seats[-moved:] + seats[:-moved], strict=True))

    async def _play_seat(self, seat: Seat, who: str, journal: EpisodeJournal | None) -> Episode | None:
        """The seat's episode; None for an auxiliary model's. `journal`: None if no other explorer could continue it."""
        if who not in (POLICY, OLDER):
            await self._play_model(seat, who)
            return None
        player = self.player if who == POLICY else self._older_player()
        with player.counting() as counted:
            episode = counted.episode = player.begin(await seat.reset())
            episode.journal = journal
            await player.play_until_done(episode, seat)
        if episode.end is not End.DONE:
            seat.leave()
        return episode

    async def _play_model(self, seat: Seat, model: str) -> None:
        """An auxiliary model reads the conversation as text, and its replies are actions as those of the policy."""
        episode = self.player.begin(await seat.reset())
        messages: list[Message] = list(episode.messages)
        while not episode.end:
            (reply,) = await self.tools.judge(messages, self.player.sampling(episode), model)
            rules = self._rules
            answer = await seat.step(parse_action(reply, rules.action_form, rules.require_thinking).action or reply)
            shown = self.player.message(answer.observation, answer.images)
            messages += [{"role": "assistant", "content": reply}, shown]
            episode.info, episode.end = answer.info, End.DONE if answer.done else None

    def _older_player(self) -> Player:
        assert self._older is not None
        return self._older[1]

    def _name(self, who: str) -> str:
        """Returns who plays a seat, and the version as the game begins unless it is the policy's."""
        if who == OLDER and self._older is not None:
            return f"version {self._older[0]}"
        step = self.tools.judge_step(who) if who not in (POLICY, OLDER) else None
        return who if step is None else f"{who} {step}"

    def _scores(self, player: str, rewards: Mapping[str, float], seating: Mapping[str, str]) -> dict[str, float]:
        """The mean of 1 for less, 0.5 for equal and 0 for more reward of each other seat that the policy does not play,
        and of those of an older version."""
        scores: dict[str, list[float]] = defaultdict(list)
        for other, who in seating.items():
            if who != POLICY:
                score = 0.5 + 0.5 * ((rewards[player] > rewards[other]) - (rewards[player] < rewards[other]))
                scores["score"].append(score)
                if who == OLDER and self._older is not None:
                    scores[f"score_against_{self._older[0]}"].append(score)
        return {name: sum(values) / len(values) for name, values in scores.items()}


def _with(made: Experience, facts: dict[str, Any], scores: dict[str, float]) -> Experience:
    """Add facts to info, and scores to the metrics of the episode."""
    info = {**json.loads(made.info_json or "{}"), **facts}
    return replace(
        made, info_json=json.dumps(info), metrics={**made.metrics, **scores} if made.metrics else made.metrics
    )
