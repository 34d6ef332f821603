"""Workflows by name, and the rules of workflows that play environments: their workflow_args, with defaults by name.

The explorer implements them; a test compares. The environment decides the form of a reply, the actions and the cost of
an illegal one, by `environment_args`. The rules here hold for every conversation, and for environments that take bare
actions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, Self

from trinity import plugins


class ActionForm(StrEnum):
    """The place of the action in a reply."""

    REPLY = "reply"  # the whole reply
    ACTION = "action"  # <action>...</action>
    ANSWER = "answer"  # <answer>...</answer>
    FENCE = "fence"  # the last block between triple backticks


class Policy(StrEnum):
    """The consequence of a reply that breaks a rule."""

    END = "end"  # the episode ends, with early_end_reward
    PENALTY = "penalty"  # the policy is told, loses `penalty`, and continues
    NO_OP = "no_op"  # the policy is told, and continues
    PASS = "pass"  # the environment decides


@dataclass(frozen=True)
class Branches:
    """Places at which the episodes of a group branch.

    These are the replies numbered `turns` (from 0), or replies whose tokens have a mean surprisal (-log p) of at least
    `entropy` nats, at most `most` times on a path. `width`: branches of one branching, if enough rollouts are left.
    """

    turns: tuple[int, ...] = ()
    entropy: float | None = None
    most: int = 2
    width: int = 2

    @property
    def depth(self) -> int:
        """The most branchings on a path."""
        return len(self.turns) or self.most


@dataclass(frozen=True)
class EpisodeRules:
    """`system_prompt` null: the environment's own instructions. Lengths are in tokens, rewards as the environment's.

    `max_response_tokens` are of one turn, null: of the taskset; `max_context_tokens` of the whole conversation, null:
    of the model. on_bad_format: there is no action of `action_form`; on_long_reply: it reached its limit. max_repeats:
    this many equal actions in a row end the episode; 0: no limit. step_wise: every turn is one experience. branches:
    arguments of Branches; empty: episodes do not branch.
    """

    environment: str = ""
    environment_args: dict[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    action_form: ActionForm = ActionForm.REPLY
    require_thinking: bool = False
    max_turns: int = 100
    max_response_tokens: int | None = None
    max_context_tokens: int | None = None
    max_observation_characters: int = 20_000
    on_bad_format: Policy = Policy.END
    on_long_reply: Policy = Policy.PASS
    max_repeats: int = 0
    penalty: float = 0.1
    early_end_reward: float = 0.0
    step_wise: bool = False
    branches: dict[str, Any] = field(default_factory=dict)

    @property
    def branching(self) -> Branches | None:
        turns = tuple(sorted(self.branches.get("turns", ())))
        return Branches(**{**self.branches, "turns": turns}) if self.branches else None

    def with_args(self, args: dict[str, Any]) -> Self:
        """Returns these rules with a YAML's workflow_args, which have no problem, in place of the defaults."""
        environment = args.get("environment", self.environment)
        given: dict[str, Any] = {}
        for_environment = {**self.environment_args, **args.get("environment_args", {})}
        for name, value in args.items():
            rule, argument = _meaning(name, environment)
            if rule:
                kind = type(getattr(self, rule))
                given[rule] = kind(value) if issubclass(kind, StrEnum) else value
            if argument and value is not None:
                for_environment[argument] = value
        given["environment_args"] = for_environment
        return replace(self, **given)

    def problems(self, args: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yields (argument, problem) for the workflow_args of a YAML."""
        known = [f.name for f in fields(self)]
        environment, inner = args.get("environment", self.environment), args.get("environment_args")
        set_by = {_INNER + name: _INNER + name for name in (inner if isinstance(inner, dict) else ())}
        most: Any = self.max_turns
        for name, value in args.items():
            rule, argument = _meaning(name, environment)
            most = value if rule == "max_turns" else most
            if rule and rule not in known:
                yield name, _unknown(name, known)
                continue
            problem = _problem(rule, value, getattr(self, rule)) if rule else _lake_problem(name, value)
            if problem:
                yield name, problem
            targets = [target for target in (rule, argument and _INNER + argument) if target]
            if same := next((set_by[target] for target in targets if target in set_by), ""):
                yield name, f"means the same as {same}; give one of the two"
            set_by.update(dict.fromkeys(targets, name))
        if not environment:
            yield "environment", "is missing; give the name of an environment"
        branches = args.get("branches")
        last = max(branches.get("turns", [0])) if branches and not _branches_problem(branches) else 0
        if type(most) is int and 0 < most <= last:
            yield "branches", f"has the turn {last}, must be below max_turns={most}: replies are numbered from 0"


# Values of seats; any other is the name of an auxiliary model.
POLICY, OLDER = "policy", "older"


@dataclass(frozen=True)
class GameRules(EpisodeRules):
    """Rules of games of several players.

    seats: `policy`, `older` or an auxiliary model, by player; the policy plays the others. rotate: rollout i of a group
    moves the seats i players on.
    """

    seats: dict[str, Any] = field(default_factory=dict)
    rotate: bool = False

    def problems(self, args: dict[str, Any]) -> Iterator[tuple[str, str]]:
        yield from super().problems(args)
        if args.get("branches"):
            yield "branches", "is set; games of several players do not branch, leave it out"
        seats = args.get("seats")
        for player, seat in seats.items() if isinstance(seats, dict) else ():
            if not isinstance(seat, str):
                wanted = f"must be {POLICY}, {OLDER} or the name of an auxiliary model"
                yield f"seats.{player}", f"is {seat!r:.100}, {wanted}"

    def seats_problem(self, players: Sequence[str]) -> tuple[str, str] | None:
        """Returns (argument, problem) of seats that do not fit the players of the environment; None if they fit."""
        known = ", ".join(players)
        if not players:
            return "environment", f"is {self.environment!r}, of one player; use environment_workflow"
        if unknown := sorted(set(self.seats) - set(players)):
            return f"seats.{unknown[0]}", f"is given, and the players of {self.environment} are {known}"
        if POLICY not in [self.seats.get(player, POLICY) for player in players]:
            return "seats", f"leaves the policy no seat; give it one of {known}"
        return None


def _unknown(name: str, known: list[str]) -> str:
    near = get_close_matches(str(name), known, n=1)
    return f"is not known; {f'did you mean {near[0]!r}? ' if near else ''}known: {', '.join(known)}"


_INNER = "environment_args."
# The limit of steps in Trinity-RFT's YAMLs: here conversation and environment each have one.
_STEP_NAMES = ("max_env_steps", "agent_max_steps")
_GAMES = ("alfworld", "webshop", "scienceworld", "frozen_lake", "sokoban", "sudoku", "gym_card")
_CARD_GAMES = ("number_line", "ez_points", "points24", "blackjack")
_STEP_ARGUMENTS = {
    **dict.fromkeys((*_GAMES, *_CARD_GAMES), "max_steps"),
    **dict.fromkeys(("math", "countdown"), "max_attempts"),
}
# FrozenLake's arguments in Trinity-RFT's YAMLs, and the environment's names of them.
_LAKE_ARGUMENTS = {"env_max_steps": "path_max_steps", "is_slippery": "is_slippery", "desc": "desc"}


def _meaning(name: str, environment: Any) -> tuple[str, str]:
    """(rule, argument of the environment) that an entry of workflow_args sets; empty: none."""
    if name in _STEP_NAMES:
        return "max_turns", _STEP_ARGUMENTS.get(str(environment), "")
    if environment == "frozen_lake" and name in _LAKE_ARGUMENTS:
        return "", _LAKE_ARGUMENTS[name]
    return name, ""


def _lake_problem(name: str, value: Any) -> str:
    if name == "desc":
        return "" if value is None else f"is {value!r}, must be null: a map belongs into its row, in a column desc"
    return _problem("is_slippery", value, False) if name == "is_slippery" else _problem("max_turns", value, 8)


_LARGEST = 1_000_000_000  # of turns, tokens, characters
_OPTIONAL = {"max_response_tokens": int, "max_context_tokens": int, "system_prompt": str}


def _problem(name: str, value: Any, default: Any) -> str:
    """Empty if there is none."""
    kind: type = _OPTIONAL.get(name, type(default))
    if value is None and name in _OPTIONAL:
        return ""
    if name == "branches":
        return _branches_problem(value)
    if isinstance(default, StrEnum):
        return "" if value in list(type(default)) else f"is {value!r}, must be one of {', '.join(type(default))}"
    if name == "max_repeats":
        good = type(value) is int and (value == 0 or 1 < value <= _LARGEST)
        return "" if good else f"is {value!r}, must be 0 or at least 2"
    if name.startswith("max_"):
        good = type(value) is int and 1 <= value <= _LARGEST
        return "" if good else f"is {value!r}, must be a whole number from 1 to {_LARGEST:,}"
    if isinstance(default, float):
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9
        return "" if good else f"is {value!r}, must be a number"
    words = {dict: "a mapping", bool: "true or false", str: "text"}
    return "" if isinstance(value, kind) else f"is {value!r}, must be {words[kind]}"


_MOST_BRANCHINGS = 8  # on a path


def _branches_problem(value: Any) -> str:
    form = "give {turns: [1, ...]} or {entropy: nats, most: 2}, and width: 2"
    if not isinstance(value, dict):
        return f"is {value!r}, must be a mapping; {form}"
    if unknown := sorted(set(value) - {one.name for one in fields(Branches)}):
        return f"has {unknown[0]!r}, which is not known; {form}"
    if not value:
        return ""
    if ("turns" in value) == ("entropy" in value):
        return f"has {'both' if 'turns' in value else 'none'} of turns and entropy; {form}"
    turns, entropy = value.get("turns", [1]), value.get("entropy", 0.0)
    whole = isinstance(turns, list) and all(type(turn) is int and 1 <= turn <= _LARGEST for turn in turns)
    if not whole or not 1 <= len(set(turns)) == len(turns) <= _MOST_BRANCHINGS:
        return f"has the turns {turns!r:.100}, must be 1 to {_MOST_BRANCHINGS} different whole numbers from 1 on"
    if isinstance(entropy, bool) or not isinstance(entropy, int | float) or not 0 <= entropy < 1e9:
        return f"has the entropy {entropy!r}, must be a number >= 0"
    for name, least, most in (("most", 1, _MOST_BRANCHINGS), ("width", 2, 64)):
        number = value.get(name, least)
        if type(number) is not int or not least <= number <= most:
            return f"has the {name} {number!r}, must be a whole number from {least} to {most}"
    return "has most, which is for entropy; turns say it" if "turns" in value and "most" in value else ""


# R3L's rules: strict replies, and any other reply ends the episode.
_STRICT = {"reply_format": "strict", "on_invalid_format": "end"}
_ALFWORLD = {**_STRICT, "on_invalid_action": "end", "end_penalty": 0.0, "max_repeats": 3, "max_steps": 25}
_WEBSHOP = {
    **_STRICT,
    "on_invalid_action": "penalty",
    "penalty": 0.1,
    "end_penalty": 0.1,
    "max_repeats": 2,
    "max_steps": 15,
}
_SCIENCEWORLD = {**_STRICT, "end_penalty": 0.0, "max_repeats": 3, "max_steps": 30}
# A malformed answer is a wrong one: it costs an attempt.
_ATTEMPTS = {"reply_format": "strict", "max_attempts": 3}
_SOKOBAN = {**_STRICT, "rewards": "sparse", "max_steps": 30}
R3L_RULES: dict[str, EpisodeRules] = {
    "alfworld": EpisodeRules("alfworld", _ALFWORLD, max_turns=25, max_response_tokens=512),
    "webshop": EpisodeRules("webshop", _WEBSHOP, max_turns=15, max_response_tokens=512),
    "scienceworld": EpisodeRules("scienceworld", _SCIENCEWORLD, max_turns=30, max_response_tokens=512),
    "dapo": EpisodeRules("math", _ATTEMPTS, max_turns=3, max_response_tokens=4096),
    "countdown": EpisodeRules("countdown", _ATTEMPTS, max_turns=3, max_response_tokens=1024),
    "sokoban": EpisodeRules("sokoban", _SOKOBAN, max_turns=30, max_response_tokens=512),
    "gym_card": EpisodeRules("gym_card", {**_STRICT}, max_turns=20, max_response_tokens=512),
}
# Trinity-RFT's rewards: -0.1 for a task that is not solved, and for a visit to the shop that ends without a purchase.
_ALFWORLD_RFT = {"max_steps": 30, "failure_reward": -0.1, "end_penalty": 0.1}
_WEBSHOP_RFT = {"max_steps": 15, "failure_reward": -0.1, "end_penalty": 0.1}
# The environments' own rules: lenient replies, an illegal action costs its turn.
PLAIN_RULES: dict[str, EpisodeRules] = {
    "environment_workflow": EpisodeRules(),
    "step_wise_environment_workflow": EpisodeRules(step_wise=True),
    "alfworld_workflow": EpisodeRules("alfworld", _ALFWORLD_RFT, max_turns=30),
    "step_wise_alfworld_workflow": EpisodeRules("alfworld", _ALFWORLD_RFT, max_turns=30, step_wise=True),
    "RAFT_alfworld_workflow": EpisodeRules("alfworld", _ALFWORLD_RFT, max_turns=30),
    "sciworld_workflow": EpisodeRules("scienceworld", {"max_steps": 30}, max_turns=30),
    "webshop_workflow": EpisodeRules("webshop", _WEBSHOP_RFT, max_turns=15),
    "frozen_lake_workflow": EpisodeRules("frozen_lake", {"max_steps": 10}, max_turns=10),
    "sokoban_workflow": EpisodeRules("sokoban"),
    "sudoku_workflow": EpisodeRules("sudoku", max_turns=20),
    "gym_card_workflow": EpisodeRules("gym_card"),
    "countdown_workflow": EpisodeRules("countdown"),
    "dapo_workflow": EpisodeRules("math", {"max_attempts": 3}, max_turns=3),
    "players_workflow": GameRules(),
}
EPISODE_WORKFLOWS: dict[str, EpisodeRules] = {
    **PLAIN_RULES,
    **{f"grpo_baseline_{name}_workflow": rules for name, rules in R3L_RULES.items()},
}
R3L_WORKFLOWS: dict[str, EpisodeRules] = {
    "R3L_workflow": EpisodeRules(),
    **{f"R3L_{name}_workflow": rules for name, rules in R3L_RULES.items()},
}
LEAST_REFLECTION_TOKENS = 16
R3L_ARGS: dict[str, Any] = {"max_reflection_tokens": 4096, "retry_from": "step", "retry_environment_args": {}}

TOOL_ARGS: dict[str, Any] = {
    "tools": [],
    "environment": "",
    "environment_args": {},
    "max_turns": 8,
    "max_response_tokens": None,
    "tool_timeout_seconds": 30.0,
}

THINKING_ARGS: dict[str, Any] = {"thinking_token_budget": 0, "reasoning_end_str": "</think>", "reward_model": None}

_SINGLE_TURN = ("simple", "simple_mm", "math", "math_boxed", "math_eval", "math_rm", "math_ruler")
WORKFLOWS: tuple[str, ...] = (
    *(f"{name}_workflow" for name in _SINGLE_TURN),
    *(f"async_{name}_workflow" for name in _SINGLE_TURN),
    "rubric_judge_workflow",
    "rubric_judge_openai_workflow",
    "math_trainable_ruler_workflow",
    "on_policy_distill_workflow",
    "on_policy_distill_math_workflow",
    "tool_call_workflow",
    "thinking_budget_workflow",
    "external_agent_workflow",
    "traffic_workflow",
    *EPISODE_WORKFLOWS,
    *R3L_WORKFLOWS,
)
_JUDGE: dict[str, type] = {"judge": str, "judge_temperature": float, "judge_max_tokens": int}
# Workflows of one turn that take arguments, or none; the argument that names an auxiliary model comes first.
_ASKING: dict[str, dict[str, type]] = {
    "math_rm_workflow": {"reward_model": str},
    "async_math_rm_workflow": {"reward_model": str},
    "math_ruler_workflow": _JUDGE,
    "async_math_ruler_workflow": _JUDGE,
    "rubric_judge_workflow": {**_JUDGE, "rubric_key": str, "rubric": list},
    "rubric_judge_openai_workflow": {**_JUDGE, "rubric_key": str, "rubric": list},
    "on_policy_distill_workflow": {"teacher": str, "privileged": str},
    "on_policy_distill_math_workflow": {"teacher": str, "privileged": str},
}
# The policy is the judge.
_OWN_JUDGE: dict[str, dict[str, type]] = {
    "math_trainable_ruler_workflow": {"judge_temperature": float, "judge_max_tokens": int}
}
# They ask a reward model only where workflow_args name one.
_MAY_ASK: dict[str, dict[str, type]] = {
    f"{a}{name}_workflow": {"reward_model": str}
    for name in ("simple", "math", "math_boxed", "math_eval")
    for a in ("", "async_")
}
_ARGS = _ASKING | _OWN_JUDGE | _MAY_ASK
# The satellite of Trinity-RFT implements them.
OF_TRINITY_RFT = {*R3L_WORKFLOWS, *_OWN_JUDGE, *(name for name, args in _ASKING.items() if "judge" in args)}
_ONE_TURN = (
    {f"{a}{name}_workflow" for name in _SINGLE_TURN for a in ("", "async_")} | _ASKING.keys() | _OWN_JUDGE.keys()
)


def asked_model(workflow: str, args: dict[str, Any]) -> str | None:
    """The auxiliary model that a built-in workflow asks; empty: the first of its kind; None: it asks none."""
    if (workflow in _MAY_ASK or workflow == "thinking_budget_workflow") and args.get("reward_model") is not None:
        return str(args["reward_model"])
    if workflow not in _ASKING:
        return None
    return str(args.get(next(iter(_ASKING[workflow]))) or "")


def scores_by_name(workflow: str) -> bool:
    """Tells if a built-in workflow scores replies with the task's reward function instead of a fixed one."""
    plain = workflow.removeprefix("async_")
    named = ("simple", "simple_mm", "math", "tool_call", "thinking_budget")
    return plain in {f"{name}_workflow" for name in named}


def reads_prompt(workflow: str) -> bool:
    """Tells if a built-in workflow sends the text of the row's prompt column; environments read rows by themselves."""
    return workflow in _ONE_TURN or workflow == "thinking_budget_workflow"


def scored_by(workflow: str, reward_function: str) -> str:
    """The reward function that scores a task of a built-in workflow; empty: another one, or none that is known."""
    plain = workflow.removeprefix("async_")
    own = {"math_boxed_workflow": "math_boxed_reward", "math_eval_workflow": "accuracy_reward"}
    return own.get(plain, reward_function if scores_by_name(workflow) else "")


def ignored_args(workflow: str, args: dict[str, Any]) -> list[str]:
    """Arguments that a built-in workflow of one turn does not read; Trinity-RFT's are not refused."""
    return [name for name in args if workflow in _ONE_TURN and name not in _ARGS.get(workflow, {})]


def _asking_problems(known: dict[str, type], args: dict[str, Any]) -> Iterator[tuple[str, str]]:
    words = {str: "text", float: "a number >= 0", int: "a whole number >= 1", list: "a list of {description, weight}"}
    for name, kind in known.items():
        value: Any = args.get(name)
        if name not in args or (kind is list and value is None):
            continue
        good = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
        if not good or (kind not in (str, list) and not (kind is int) <= value <= _LARGEST) or value == []:
            yield name, f"is {value!r}, must be {words[kind]}"
        elif kind is list:
            yield from ((name, f"{name}.{i} {p}") for i, entry in enumerate(value) if (p := criterion_problem(entry)))


def criterion_problem(entry: Any) -> str:
    """Says why an entry of a rubric is wrong; empty if it is right."""
    given = entry if isinstance(entry, dict) else {"description": entry}
    description, weight = given.get("description"), given.get("weight", 1.0)
    if not isinstance(description, str) or not description.strip():
        return f"is {entry!r}, must be {{description: text, weight: a number above 0}}"
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= _LARGEST:
        return f"has the weight {weight!r}, must be a number above 0"
    return ""


def workflow_problems(workflow: str, args: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (argument, problem) for the workflow_args of a built-in workflow of several turns."""
    if workflow in _ARGS:
        yield from _asking_problems(_ARGS[workflow], args)
    elif workflow in EPISODE_WORKFLOWS:
        yield from EPISODE_WORKFLOWS[workflow].problems(args)
    elif workflow in R3L_WORKFLOWS:
        yield from R3L_WORKFLOWS[workflow].problems({n: v for n, v in args.items() if n not in R3L_ARGS})
        yield from r3l_problems(args)
    elif workflow == "tool_call_workflow":
        yield from tool_problems(args)
    elif workflow == "thinking_budget_workflow":
        yield from thinking_problems(args)


def is_one_sequence(workflow: str, args: dict[str, Any]) -> bool:
    """Tells if a workflow makes one sequence of several turns, which needs a template that keeps history unchanged."""
    if workflow == "tool_call_workflow":
        return True
    rules = {**EPISODE_WORKFLOWS, **R3L_WORKFLOWS}.get(workflow)
    return rules is not None and not args.get("step_wise", rules.step_wise)


def r3l_problems(args: dict[str, Any]) -> Iterator[tuple[str, str]]:
    tokens = args.get("max_reflection_tokens", LEAST_REFLECTION_TOKENS)
    if type(tokens) is not int or not LEAST_REFLECTION_TOKENS <= tokens <= _LARGEST:
        yield "max_reflection_tokens", f"is {tokens!r}, must be a whole number >= {LEAST_REFLECTION_TOKENS}"
    if args.get("retry_from", "step") not in ("step", "start"):
        yield "retry_from", f"is {args['retry_from']!r}, must be step or start"
    if not isinstance(args.get("retry_environment_args", {}), dict):
        yield "retry_environment_args", f"is {args['retry_environment_args']!r}, must be a mapping"
    if args.get("step_wise") is True:
        yield "step_wise", "is true; R3L learns whole episodes, use false"
    if args.get("branches"):
        yield "branches", "is set; R3L tries again by itself, leave it out"


def thinking_problems(args: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "thinking_token_budget" not in args:
        yield "thinking_token_budget", "is missing; give the most tokens of the thoughts, 0 for none"
    for name, value in args.items():
        if name not in THINKING_ARGS:
            yield name, _unknown(name, [*THINKING_ARGS])
        elif name == "thinking_token_budget" and (type(value) is not int or not 0 <= value <= _LARGEST):
            yield name, f"is {value!r}, must be a whole number from 0 to {_LARGEST:,}"
        elif name == "reasoning_end_str" and (not isinstance(value, str) or not value):
            yield name, f"is {value!r}, must be text that ends the thoughts, such as </think>"
        elif name == "reward_model" and value is not None and not isinstance(value, str):
            yield name, f"is {value!r}, must be text"


def tool_problems(args: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The plugins that register tools are loaded."""
    for name, value in args.items():
        if name not in TOOL_ARGS:
            yield name, _unknown(name, [*TOOL_ARGS])
        elif name == "tools":
            known = ", ".join(plugins.TOOLS) or "none"
            if not isinstance(value, list):
                yield name, f"is {value!r}, must be a list of names"
            elif unknown := [tool for tool in value if not isinstance(tool, str) or tool not in plugins.TOOLS]:
                yield name, f"names {unknown[0]!r}, which no plugin registers; known: {known}"
        elif problem := _problem(name, value, TOOL_ARGS[name]):
            yield name, problem
        elif name == "tool_timeout_seconds" and not value > 0:
            yield name, f"is {value!r}, must be above 0"
