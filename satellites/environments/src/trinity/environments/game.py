"""A text game of turns: the part that all of them share, and those whose moves are calls of tools.

A reply names one action. A reply that cannot be used (no action in it, or an unknown one) is counted and handled as the
YAML says (END, PENALTY or NOOP). The game itself implements `begin`, `play` and `actions`.
"""

import json
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar

from trinity.environments.arguments import Arguments
from trinity.environments.replies import MAX_REPLY_CHARACTERS, Reply, ReplyFormat, parse, write
from trinity.sdk.environment import Environment, Observation


class OnInvalid(StrEnum):
    """Rules for an unusable reply. The turn counts in every case."""

    END = "end"  # the episode is over, with `end_penalty` taken from the reward
    PENALTY = "penalty"  # nothing moves, `penalty` is taken from the reward
    NOOP = "noop"  # nothing moves


@dataclass(frozen=True)
class TurnRules:
    """The rules of turns, as the YAML may set them in the environment's arguments. Penalties are positive numbers."""

    max_steps: int = 30
    reply_format: str = ReplyFormat.LENIENT
    on_invalid_format: str = OnInvalid.NOOP
    on_invalid_action: str = OnInvalid.NOOP
    penalty: float = 0.1
    end_penalty: float = 0.0
    failure_reward: float = 0.0  # added when the steps are used up without success
    max_repeats: int = 0  # equal actions in a row, refused ones too, that end the episode; 0: no limit
    max_reply_characters: int = MAX_REPLY_CHARACTERS
    list_actions: bool = True  # observations end with the actions there are
    rewards_add_up: bool = True  # else the episode's reward is that of its last step

    @classmethod
    def read(cls, args: Arguments, defaults: "TurnRules") -> "TurnRules":
        policies = [policy.value for policy in OnInvalid]
        return cls(
            max_steps=args.integer("max_steps", defaults.max_steps, low=1),
            reply_format=args.choice("reply_format", defaults.reply_format, [form.value for form in ReplyFormat]),
            on_invalid_format=args.choice("on_invalid_format", defaults.on_invalid_format, policies),
            on_invalid_action=args.choice("on_invalid_action", defaults.on_invalid_action, policies),
            penalty=args.number("penalty", defaults.penalty, low=0),
            end_penalty=args.number("end_penalty", defaults.end_penalty, low=0),
            failure_reward=args.number("failure_reward", defaults.failure_reward),
            max_repeats=args.integer("max_repeats", defaults.max_repeats, low=0),
            max_reply_characters=args.integer("max_reply_characters", defaults.max_reply_characters, low=1),
            list_actions=args.boolean("list_actions", defaults.list_actions),
            rewards_add_up=args.boolean("rewards_add_up", defaults.rewards_add_up),
        )


@dataclass(frozen=True)
class Turn:
    """The game's answer to a legal action."""

    text: str
    reward: float = 0.0
    done: bool = False
    success: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


class Refused(Exception):
    """Raised by `play`: the game has no such action, and its state is unchanged. The text says why."""


class TextGame(Environment):
    """Derive from it for a game of turns. An episode's reward is the sum over its steps."""

    instructions: str = ""
    defaults: ClassVar[TurnRules] = TurnRules()
    tag: ClassVar[str] = "action"
    goal: str = ""  # the task in one sentence, once `begin` knows it

    def __init__(self) -> None:
        self.held = ExitStack()  # what `begin` opens for the episode is closed with it

    @abstractmethod
    def begin(self, task: Arguments, args: Arguments, seed: int) -> str:
        """Set the game up; the first observation. Raises InvalidInput naming what the row or the arguments lack."""

    @abstractmethod
    def play(self, action: str) -> Turn:
        """Make a move that `refusal` let pass. Raises Refused where only the move itself shows that it is none."""

    def actions(self) -> Sequence[str]:
        """Returns every legal action now; empty where they are too many to list."""
        return ()

    def refusal(self, action: str) -> str:
        """Why the action is none of this game; empty if it is one, or if only the move itself shows that."""
        known = self.actions()
        return "" if not known or action in known else f"{action!r} is not among the available actions"

    def read(self, reply: str) -> Reply:
        """Returns the action of a reply, in the spelling of `actions` if only the case differs."""
        found = parse(reply, self.rules.reply_format, self.tag, self.rules.max_reply_characters)
        if found.problem or not (known := self.actions()) or found.action in known:
            return found
        same = [action for action in known if action.casefold() == found.action.casefold()]
        return replace(found, action=same[0]) if len(same) == 1 else found

    def repeatable(self, action: str) -> bool:
        """Tells if `max_repeats` does not limit this action."""
        return False

    @classmethod
    def oracle(cls, task: dict[str, Any], args: dict[str, Any], seed: int) -> list[str]:
        """Replies that win the task's episode. Raises Unsolvable where there are none."""
        raise Unsolvable(f"{cls.description.name} has no oracle")

    def close(self) -> None:
        self.held.close()

    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        arguments = Arguments(args)
        self.rules = TurnRules.read(arguments, self.defaults)
        self.steps = 0
        self.total_reward = 0.0
        self.counts = {"invalid_format": 0, "invalid_action": 0}
        self._measured: dict[str, float] = {}
        self._last_actions: list[str] = []
        self.last_text = self.begin(Arguments(task, "task"), arguments, seed)
        arguments.finish()
        answer = self._observation(Turn(self.last_text), "")
        instructions = self.instructions + "\n\n" if self.instructions else ""
        return replace(answer, text=instructions + answer.text, info={**answer.info, "instructions": self.instructions})

    def step(self, action: str) -> Observation:
        self.steps += 1
        turn, problem = self._turn(self.read(action))
        if not turn.done and self.steps >= self.rules.max_steps:
            text = f"{turn.text}\n{self.limit_text()}"
            turn = replace(turn, text=text, reward=turn.reward + self.rules.failure_reward, done=True)
        return self._observation(turn, problem)

    def limit_text(self) -> str:
        return f"All {self.rules.max_steps} steps are used up."

    def _turn(self, reply: Reply) -> tuple[Turn, str]:
        """Plays a reply; returns the outcome, and the reason if the reply is unusable."""
        if reply.problem:
            self._last_actions.clear()
            return self._refuse("invalid_format", reply.problem), reply.problem
        repeated = self._repeats(reply.action)  # a refused action counts too
        problem = self.refusal(reply.action)
        if repeated:
            self.counts["invalid_action"] += bool(problem)
            text = f"The same action came {self.rules.max_repeats} times in a row."
            return Turn(text, -self.rules.end_penalty, done=True), problem
        if not problem:
            try:
                turn = self.play(reply.action)
            except Refused as refused:
                problem = str(refused)
            else:
                self.last_text = turn.text
                return turn, ""
        return self._refuse("invalid_action", problem), problem

    def _refuse(self, kind: str, problem: str) -> Turn:
        self.counts[kind] += 1
        policy = self.rules.on_invalid_format if kind == "invalid_format" else self.rules.on_invalid_action
        if policy == OnInvalid.END:
            return Turn(f"The episode ends: {problem}.", -self.rules.end_penalty, done=True)
        reward = -self.rules.penalty if policy == OnInvalid.PENALTY else 0.0
        return Turn(self.refused_text(problem), reward)

    def refused_text(self, problem: str) -> str:
        """The observation of a reply that could not be used, when the game continues."""
        return f"Nothing happens: {problem}.\n{self.last_text}"

    def _repeats(self, action: str) -> bool:
        if not self.rules.max_repeats or self.repeatable(action):
            self._last_actions.clear()
            return False
        self._last_actions = [*self._last_actions, action][-self.rules.max_repeats :]
        return self._last_actions.count(action) >= self.rules.max_repeats

    def _observation(self, turn: Turn, problem: str) -> Observation:
        reward = turn.reward if self.rules.rewards_add_up else turn.reward - self.total_reward
        self.total_reward += reward
        self._measured |= turn.metrics
        available = [] if turn.done or not self.rules.list_actions else list(self.actions())
        info: dict[str, Any] = {"observation": turn.text, "success": turn.success, "task": self.goal}
        if available:
            info["available_actions"] = available
        if problem:
            info["problem"] = problem
        metrics = {
            "success": float(turn.success),
            "steps": float(self.steps),
            "reward": self.total_reward,
            **{name: float(count) for name, count in self.counts.items()},
            **self._measured,
        }
        text = turn.text + (f"\nAvailable actions: {', '.join(available)}" if available else "")
        return Observation(text, reward, turn.done, info, metrics)


class ToolGame(TextGame):
    """A game whose moves are calls {"name", "arguments"} of `tools`, each {name, description, parameters}.

    Metrics: tool_calls, tool_errors.
    """

    tools: list[dict[str, Any]]

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.errors = 0

    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        """info.tools: the tools, for a policy whose chat template takes tools."""
        answer = super().reset(task, args, seed)
        return replace(answer, info={**answer.info, "tools": self.tools})

    def parse_call(self, text: str) -> tuple[str, dict[str, Any], str]:
        """Returns name and arguments of a call, and its problem."""
        try:
            call = json.loads(text)
            name, given = call["name"], call.get("arguments") or {}
            json.dumps(call, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return "", {}, "the <tool_call> has half of a surrogate pair (\\ud800 to \\udfff)"
        except (ValueError, TypeError, KeyError, RecursionError, AttributeError):
            return "", {}, "the <tool_call> is no JSON object with a name"
        known = [tool["name"] for tool in self.tools]
        if name not in known:
            return "", {}, f"there is no tool {str(name)[:100]!r}; known: {', '.join(known)}"
        problem = self.arguments_problem(name, given)
        return ("", {}, problem) if problem else (name, given, "")

    def arguments_problem(self, name: str, given: Any) -> str:
        """Says why the arguments of a call are wrong; empty if they are right."""
        return "" if isinstance(given, dict) else "`arguments` is no JSON object"

    def called(self, result: str, failed: bool) -> Turn:
        """The turn of a call that was made."""
        self.calls += 1
        self.errors += failed
        return Turn(f"<tool_response>\n{result}\n</tool_response>", metrics=self.tool_metrics())

    def tool_metrics(self) -> dict[str, float]:
        return {"tool_calls": float(self.calls), "tool_errors": float(self.errors)}

    def refused_text(self, problem: str) -> str:
        return f"That did not work: {problem}."


class Unsolvable(Exception):
    """No oracle can win this task."""


def replies(actions: Sequence[str], tag: str = "action") -> list[str]:
    """Actions as replies in the strict format."""
    return [write(action, tag) for action in actions]


FORMAT_HINT = "Think first, then reply with exactly one action: <think>...</think><action>...</action>"
