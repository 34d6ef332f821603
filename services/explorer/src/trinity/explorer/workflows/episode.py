"""A played episode, its metrics, and its experiences."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from trinity.config.workflows import EpisodeRules
from trinity.data.experience import Experience
from trinity.data.images import digest, plain
from trinity.explorer.chat import Message
from trinity.explorer.journal.journal import EpisodeJournal
from trinity.explorer.types import Completion
from trinity.explorer.workflows.conversation import Conversation


class End(StrEnum):
    """Why an episode ended. Failures are counted separately, as failed_<cause>."""

    DONE = "done"
    TURN_LIMIT = "turn_limit"
    CONTEXT_LIMIT = "context_limit"
    BAD_FORMAT = "bad_format"
    LONG_REPLY = "long_reply"
    REPEATED = "repeated"


# Rewards are sums of floats: smaller differences are rounding errors.
REWARD_TOLERANCE = 1e-6
EARLY = (End.BAD_FORMAT, End.LONG_REPLY, End.REPEATED)


@dataclass(frozen=True)
class Turn:
    """One turn: the observation and its images, the policy's reply, and its reward.

    `action` is the text sent to the environment, empty if a `problem` (an End) kept the reply from being sent.
    """

    observation: str
    reply: str
    action: str
    problem: str = ""
    reward: float = 0.0
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Branching:
    """Origin of an episode that shares its turns before `turn` (from 0) with the rollout `parent`, which trains them.
    `number`: branchings on its path."""

    parent: int
    turn: int
    number: int


@dataclass
class Episode:
    """An episode so far. `conversation` has one exchange for each turn; `messages` are the same as text.

    `answered` and `images`: the environment's last answer; `observation` may add why a reply was not sent to it.
    `shown`: image files that parts of `messages` stand for, in order.
    `steps`: the conversation at each turn's reply, if each turn is a separate experience.
    `journal`: set if another explorer can continue the episode. `branching`: None if it shares no turn of another.
    """

    rules: EpisodeRules
    conversation: Conversation
    messages: list[Message]
    observation: str
    turns: list[Turn] = field(default_factory=list)
    steps: list[Conversation] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    end: End | None = None
    answered: str = ""
    images: tuple[bytes, ...] = ()
    shown: list[bytes] = field(default_factory=list)
    journal: EpisodeJournal | None = None
    branching: Branching | None = None

    def branched(self, branching: Branching) -> "Episode":
        """A copy from which another rollout continues."""
        return replace(
            self, messages=[*self.messages], turns=[*self.turns], steps=[*self.steps], shown=[*self.shown],
            journal=None, branching=branching,
        )  # fmt: skip

    @property
    def shared_turns(self) -> int:
        """Turns that another rollout trains."""
        return self.branching.turn if self.branching else 0

    def __post_init__(self) -> None:
        self.answered = self.answered or self.observation

    @property
    def reward(self) -> float:
        """Sum of the environment's rewards; early_end_reward if one of the workflow's rules ended the episode."""
        if self.end in EARLY:
            return self.rules.early_end_reward
        return sum(turn.reward for turn in self.turns)

    @property
    def success(self) -> bool:
        """The environment's report of success; without a report, whether the reward is at least 1."""
        if "success" in self.metrics:
            return self.metrics["success"] > 0
        if isinstance(self.info.get("success"), bool):
            return bool(self.info["success"])
        return self.reward >= 1 - REWARD_TOLERANCE

    @property
    def moves(self) -> list[dict[str, int | str]]:
        """Turns at which another explorer continued: `turn`, and `from`, the explorer that sampled the turns before."""
        moves = self.journal.moves if self.journal is not None else []
        return [{**move, "turn": int(move["turn"]) + self.shared_turns} for move in moves]

    @property
    def sampled_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def completions(self) -> list[Completion]:
        """Every reply as it was sampled."""
        exchanges = [step.exchanges[-1] for step in self.steps] or self.conversation.exchanges
        return [exchange.completion for exchange in exchanges]

    @property
    def step_rewards(self) -> list[float]:
        """Rewards of the turns, with the episode's reward as their sum; an early end changes the last turn's."""
        rewards = [turn.reward for turn in self.turns]
        if rewards:
            rewards[-1] = self.reward - sum(rewards[:-1])
        return rewards

    def measures(self) -> dict[str, float]:
        """The environment's metrics, and success, steps and counts of bad formats and long replies.

        A reply that reached its limit is counted as long under every on_long_reply. If episodes branch, `shared_tokens`
        are those of the response that another rollout sampled.
        """
        problems = [turn.problem for turn in self.turns]
        ours = {
            "bad_format": float(sum(problem == End.BAD_FORMAT for problem in problems)),
            "long_replies": float(sum(one.finish_reason == "length" for one in self.completions)),
            **{f"end_{end}": float(self.end is end) for end in End},
            "response_tokens": float(self.sampled_tokens),
        }
        if self.rules.branching:
            shared = self.completions[: self.shared_turns]
            ours["shared_tokens"] = float(sum(len(completion.token_ids) for completion in shared))
        return {"steps": float(len(self.turns)), **self.metrics, **ours, "success": float(self.success)}


def state_hash(observation: str, images: Sequence[bytes] = ()) -> str:
    """GiGPO's anchor: turns with the same observation were in the same state."""
    hashed = hashlib.blake2b(observation.encode(), digest_size=12)
    for image in images:
        hashed.update(digest(image))
    return hashed.hexdigest()


def whole(episode: Episode, rollout: int, untrained_turns: int = 0) -> Experience:
    """The episode as one experience. Requires a chat template that leaves former turns unchanged.

    info has its moves and, if episodes branch, its origin and the begin and end of each turn among the response's
    tokens (`turns`).
    """
    made = episode.conversation.experience(rollout, episode.reward, max(untrained_turns, episode.shared_turns))
    asked, said = texts(episode.messages)
    info: dict[str, Any] = {"moved": episode.moves} if episode.moves else {}
    if episode.rules.branching:
        info |= {"turns": episode.conversation.spans, **_origin(episode)}
    return replace(
        made, metrics=episode.measures(), info_json=json.dumps(info) if info else "", prompt_text=asked,
        response_text=said,
    )  # fmt: skip


def _origin(episode: Episode) -> dict[str, int]:
    branching = episode.branching
    return {} if branching is None else {"parent": branching.parent, "branch_turn": branching.turn}


def texts(messages: Sequence[Message]) -> tuple[str, str]:
    """prompt_text and response_text for readers: the messages before the first reply, and the others."""
    shown = [f"[{m['role']}] {plain(m['content'])}" for m in messages]
    asked = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(shown))
    return "\n".join(shown[:asked]), "\n".join(shown[asked:])


def by_step(episode: Episode, rollout: int) -> list[Experience]:
    """Every turn as an experience with the episode's reward; the last experience has the episode's metrics.

    info has step_reward and, for GiGPO, env_state_hash of the observation, and a branch's origin; the last one also has
    the episode's moves. Turns that another rollout trains have empty masks.
    """
    made = []
    for number, (turn, reward) in enumerate(zip(episode.turns, episode.step_rewards, strict=True)):
        conversation = episode.steps[number]
        state = state_hash(turn.observation, turn.images)
        info = {"step_reward": reward, "env_state_hash": state, **_origin(episode)}
        step = conversation.step_experience(conversation.turns - 1, rollout, episode.reward)
        step = replace(
            step,
            step=number,
            action_mask=step.action_mask & (number >= episode.shared_turns),
            info_json=json.dumps(info),
            prompt_text=turn.observation,
            response_text=turn.reply,
        )
        made.append(step)
    if made:
        made[-1] = replace(made[-1], metrics=episode.measures())
        if episode.moves:
            info = {**json.loads(made[-1].info_json), "moved": episode.moves}
            made[-1] = replace(made[-1], info_json=json.dumps(info))
    return made
