"""Workflows by name, and the rules of workflows that play environments: their workflow_args, with defaults by name.

The explorer implements them; a test compares. The environment decides the form of a reply, the actions and the cost of
an illegal one, by `environment_args`. The rules here hold for every conversation, and for environments that take bare
actions.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    Strict,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from trinity import plugins
from trinity.config.hints import problems_in, sentences
from trinity.config.schema.base import Arguments, Name, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


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


class Branches(Arguments):
    """Places at which the episodes of a group branch.

    These are the replies numbered `turns` (from 0), or replies whose tokens have a mean surprisal (-log p) of at least
    `entropy` nats, at most `most` times on a path. `width`: branches of one branching, if enough rollouts are left.
    """

    turns: list[PositiveInt] = Field(default_factory=list, max_length=8)
    entropy: NonNegativeFloat | None = None
    most: int = Field(2, ge=1, le=8)
    width: int = Field(2, ge=2, le=64)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.model_fields_set and bool(self.turns) == (self.entropy is not None):
            raise ValueError("must have turns: [1, ...] or entropy: nats, one of the two")
        if self.turns and (len({*self.turns}) < len(self.turns) or "most" in self.model_fields_set):
            raise ValueError("must have different turns, and no most, which is for entropy")
        return self

    @property
    def depth(self) -> int:
        """The most branchings on a path."""
        return len(self.turns) or self.most


def _not_once(times: int) -> int:
    if times == 1:
        raise ValueError("must be 0 or at least 2")
    return times


def _no_map(given: object) -> None:
    if given is not None:
        raise ValueError("must be null: a map belongs into its row, in a column desc")


_Reward = Annotated[float, Field(ge=-1e9, le=1e9)]
_Reaction = Annotated[Policy, Strict(False)]


class EpisodeRules(Arguments):
    """`system_prompt` null: the environment's own instructions. Lengths are in tokens, rewards as the environment's.

    `max_response_tokens` are of one turn, null: of the taskset; `max_context_tokens` of the whole conversation, null:
    of the model. on_bad_format: there is no action of `action_form`; on_long_reply: it reached its limit. max_repeats:
    this many equal actions in a row end the episode; 0: no limit. step_wise: every turn is one experience. branches:
    empty: episodes do not branch.
    """

    environment: str = ""
    environment_args: dict[str, Any] = Field(default_factory=dict)
    system_prompt: str | None = None
    action_form: Annotated[ActionForm, Strict(False)] = ActionForm.REPLY
    require_thinking: bool = False
    max_turns: PositiveInt = 100
    max_response_tokens: PositiveInt | None = None
    max_context_tokens: PositiveInt | None = None
    max_observation_characters: PositiveInt = 20_000
    on_bad_format: _Reaction = Policy.END
    on_long_reply: _Reaction = Policy.PASS
    max_repeats: Annotated[NonNegativeInt, AfterValidator(_not_once)] = 0
    penalty: _Reward = 0.1
    early_end_reward: _Reward = 0.0
    step_wise: bool = False
    branches: Branches = Field(default_factory=Branches)

    @property
    def branching(self) -> bool:
        return self.branches != Branches()

    def with_args(self, args: dict[str, Any]) -> Self:
        """Returns these rules with a YAML's workflow_args in place of the defaults. Raises ValidationError."""
        values = {name: {**value} if isinstance(value, dict) else value for name, value in dict(self).items()}
        for _, (rule, argument), value in self._given(args):
            (values[rule] if argument else values)[argument or rule] = value
        return type(self).model_validate(values)

    def _given(self, args: dict[str, Any]) -> Iterator[tuple[str, tuple[str, str], Any]]:
        """Yields (entry of workflow_args, what it sets, value). Some entries of Trinity-RFT set two.

        An entry sets a rule. Where the rule is a mapping, the entry sets one of its arguments.
        """
        environment, mappings = args.get("environment", self.environment), dict(self)
        for name, value in args.items():
            if isinstance(mappings.get(name), dict) and isinstance(value, dict):
                yield from ((f"{name}.{inner}", (name, inner), one) for inner, one in value.items())
            elif name in _STEP_NAMES:
                yield name, ("max_turns", ""), value
                if argument := _STEP_ARGUMENTS.get(str(environment)):
                    yield name, ("environment_args", argument), value
            elif environment != "frozen_lake" or name not in _LakeArguments.model_fields:
                yield name, (name, ""), value
            elif name != "desc":
                argument = "path_max_steps" if name == "env_max_steps" else name
                yield name, ("environment_args", argument), value

    def problems(self, args: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yields (argument, problem) for the workflow_args of a YAML."""
        set_by, same = dict[tuple[str, str], str](), dict[str, str]()
        for name, target, _ in self._given(args):
            if (other := set_by.setdefault(target, name)) != name:
                same[name] = other
        yield from ((name, f"means the same as {other}; give one of the two") for name, other in same.items())
        if args.get("environment", self.environment) == "frozen_lake":
            of_lake = {name: value for name, value in args.items() if name in _LakeArguments.model_fields}
            yield from problems_in(of_lake, _LakeArguments)
        try:
            found = self.with_args(args)
        except ValidationError as error:
            yield from ((set_by.get((path, ""), path), problem) for path, problem in sentences(error, type(self)))
            return
        if not found.environment:
            yield "environment", "is missing; give the name of an environment"
        if (last := max(found.branches.turns, default=0)) >= found.max_turns:
            most = f"must be below max_turns={found.max_turns}: replies are numbered from 0"
            yield "branches", f"has the turn {last}, {most}"


# Values of seats; any other is the name of an auxiliary model.
POLICY, OLDER = "policy", "older"


class GameRules(EpisodeRules):
    """Rules of games of several players.

    seats: `policy`, `older` or an auxiliary model, by player; the policy plays the others. rotate: rollout i of a group
    moves the seats i players on.
    """

    seats: dict[str, str] = Field(default_factory=dict)
    rotate: bool = False

    @field_validator("branches")
    @classmethod
    def _no_branches(cls, value: Branches) -> Branches:
        if value != Branches():
            raise ValueError("must be left out: games of several players do not branch")
        return value

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


LEAST_REFLECTION_TOKENS = 16


class ReflectionRules(EpisodeRules):
    """Rules of R3L. retry_from: start for whole second attempts, which have `retry_environment_args` in addition."""

    max_reflection_tokens: int = Field(4096, ge=LEAST_REFLECTION_TOKENS, le=1_000_000_000)
    retry_from: Literal["step", "start"] = "step"
    retry_environment_args: dict[str, Any] = Field(default_factory=dict)

    @field_validator("step_wise", "branches")
    @classmethod
    def _whole(cls, value: bool | Branches) -> bool | Branches:
        if value not in (False, Branches()):
            raise ValueError("must be left out: R3L learns whole episodes, and tries again by itself")
        return value


# The limit of steps in Trinity-RFT's YAMLs: here conversation and environment each have one.
_STEP_NAMES = ("max_env_steps", "agent_max_steps")
_GAMES = ("alfworld", "webshop", "scienceworld", "frozen_lake", "sokoban", "sudoku", "gym_card")
_CARD_GAMES = ("number_line", "ez_points", "points24", "blackjack")
_STEP_ARGUMENTS = {
    **dict.fromkeys((*_GAMES, *_CARD_GAMES), "max_steps"),
    **dict.fromkeys(("math", "countdown"), "max_attempts"),
}


class _LakeArguments(Arguments):
    """FrozenLake's arguments in Trinity-RFT's YAMLs."""

    env_max_steps: PositiveInt = 8
    is_slippery: bool = False
    desc: Annotated[Any, AfterValidator(_no_map)] = None


def _of(environment: str, args: dict[str, Any] | None = None, **rules: Any) -> EpisodeRules:
    return EpisodeRules(environment=environment, environment_args=args or {}, **rules)


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
    "alfworld": _of("alfworld", _ALFWORLD, max_turns=25, max_response_tokens=512),
    "webshop": _of("webshop", _WEBSHOP, max_turns=15, max_response_tokens=512),
    "scienceworld": _of("scienceworld", _SCIENCEWORLD, max_turns=30, max_response_tokens=512),
    "dapo": _of("math", _ATTEMPTS, max_turns=3, max_response_tokens=4096),
    "countdown": _of("countdown", _ATTEMPTS, max_turns=3, max_response_tokens=1024),
    "sokoban": _of("sokoban", _SOKOBAN, max_turns=30, max_response_tokens=512),
    "gym_card": _of("gym_card", {**_STRICT}, max_turns=20, max_response_tokens=512),
}
# Trinity-RFT's rewards: -0.1 for a task that is not solved, and for a visit to the shop that ends without a purchase.
_ALFWORLD_RFT = {"max_steps": 30, "failure_reward": -0.1, "end_penalty": 0.1}
_WEBSHOP_RFT = {"max_steps": 15, "failure_reward": -0.1, "end_penalty": 0.1}
# The environments' own rules: lenient replies, an illegal action costs its turn.
PLAIN_RULES: dict[str, EpisodeRules] = {
    "environment_workflow": EpisodeRules(),
    "step_wise_environment_workflow": EpisodeRules(step_wise=True),
    "alfworld_workflow": _of("alfworld", _ALFWORLD_RFT, max_turns=30),
    "step_wise_alfworld_workflow": _of("alfworld", _ALFWORLD_RFT, max_turns=30, step_wise=True),
    "RAFT_alfworld_workflow": _of("alfworld", _ALFWORLD_RFT, max_turns=30),
    "sciworld_workflow": _of("scienceworld", {"max_steps": 30}, max_turns=30),
    "webshop_workflow": _of("webshop", _WEBSHOP_RFT, max_turns=15),
    "frozen_lake_workflow": _of("frozen_lake", {"max_steps": 10}, max_turns=10),
    "sokoban_workflow": _of("sokoban"),
    "sudoku_workflow": _of("sudoku", max_turns=20),
    "gym_card_workflow": _of("gym_card"),
    "countdown_workflow": _of("countdown"),
    "dapo_workflow": _of("math", {"max_attempts": 3}, max_turns=3),
    "players_workflow": GameRules(),
}
EPISODE_WORKFLOWS: dict[str, EpisodeRules] = {
    **PLAIN_RULES,
    **{f"grpo_baseline_{name}_workflow": rules for name, rules in R3L_RULES.items()},
}
# Puzzles whose turns are tries at one answer retry from the start; an illegal action of a guided attempt may only cost
# its turn.
_RETRIES: dict[str, dict[str, Any]] = {
    **{name: {"retry_from": "start"} for name in ("dapo", "countdown")},
    **{name: {"retry_environment_args": {"on_invalid_action": "noop"}} for name in ("alfworld", "webshop")},
}
R3L_WORKFLOWS: dict[str, ReflectionRules] = {
    "R3L_workflow": ReflectionRules(),
    **{f"R3L_{name}_workflow": ReflectionRules(**dict(r), **_RETRIES.get(name, {})) for name, r in R3L_RULES.items()},
}


def _registered(tool: str) -> str:
    if tool not in plugins.TOOLS:
        raise ValueError(f"must be a tool that a plugin registers; known: {', '.join(plugins.TOOLS) or 'none'}")
    return tool


class ToolArguments(Arguments):
    """The plugins that register tools are loaded."""

    tools: list[Annotated[str, AfterValidator(_registered)]] = Field(default_factory=list)
    environment: str = ""
    environment_args: dict[str, Any] = Field(default_factory=dict)
    max_turns: PositiveInt = 8
    max_response_tokens: PositiveInt | None = None
    tool_timeout_seconds: PositiveFloat = 30.0


class ThinkingArguments(Arguments):
    """thinking_token_budget: the most tokens of the thoughts, 0 for none; reasoning_end_str ends them."""

    thinking_token_budget: NonNegativeInt
    reasoning_end_str: Name = "</think>"
    reward_model: str | None = None


class _OfOneTurn(Arguments):
    """Others have no effect, and are not refused: Trinity-RFT has more."""

    model_config = ConfigDict(extra="ignore")


class Criterion(_OfOneTurn):
    """An entry of a rubric; a text is one of weight 1."""

    description: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    weight: PositiveFloat = 1.0

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, given: Any) -> Any:
        return {"description": given} if isinstance(given, str) else given


class _Rater(_OfOneTurn):
    reward_model: str = ""


class _OwnJudge(_OfOneTurn):
    """The policy is the judge."""

    judge_temperature: NonNegativeFloat = 0.0
    judge_max_tokens: PositiveInt = 1024


class _Judge(_OfOneTurn):
    judge: str = ""
    judge_temperature: NonNegativeFloat = 0.0
    judge_max_tokens: PositiveInt = 1024


class _RubricJudge(_Judge):
    rubric_key: str = "rubric"
    rubric: Annotated[list[Criterion], Field(min_length=1)] | None = None


class _Teacher(_OfOneTurn):
    teacher: str = ""
    privileged: str = ""


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
# Workflows of one turn that take arguments, or none; the argument that names an auxiliary model comes first.
_ASKING: dict[str, type[Arguments]] = {
    **dict.fromkeys(("math_rm_workflow", "async_math_rm_workflow"), _Rater),
    **dict.fromkeys(("math_ruler_workflow", "async_math_ruler_workflow"), _Judge),
    **dict.fromkeys(("rubric_judge_workflow", "rubric_judge_openai_workflow"), _RubricJudge),
    **dict.fromkeys(("on_policy_distill_workflow", "on_policy_distill_math_workflow"), _Teacher),
}
_OWN_JUDGE: dict[str, type[Arguments]] = {"math_trainable_ruler_workflow": _OwnJudge}
# They ask a reward model only where workflow_args name one.
_MAY_ASK: dict[str, type[Arguments]] = {
    f"{a}{name}_workflow": _Rater for name in ("simple", "math", "math_boxed", "math_eval") for a in ("", "async_")
}
_OF_TURNS: dict[str, type[Arguments]] = {
    "tool_call_workflow": ToolArguments,
    "thinking_budget_workflow": ThinkingArguments,
}
_ARGS = _ASKING | _OWN_JUDGE | _MAY_ASK | _OF_TURNS
# The satellite of Trinity-RFT implements them.
OF_TRINITY_RFT = {*R3L_WORKFLOWS, *_OWN_JUDGE, *(name for name, args in _ASKING.items() if issubclass(args, _Judge))}
_ONE_TURN = (
    {f"{a}{name}_workflow" for name in _SINGLE_TURN for a in ("", "async_")} | _ASKING.keys() | _OWN_JUDGE.keys()
)


def asked_model(workflow: str, args: dict[str, Any]) -> str | None:
    """The auxiliary model that a built-in workflow asks; empty: the first of its kind; None: it asks none."""
    if (workflow in _MAY_ASK or workflow == "thinking_budget_workflow") and args.get("reward_model") is not None:
        return str(args["reward_model"])
    if workflow not in _ASKING:
        return None
    return str(args.get(next(iter(_ASKING[workflow].model_fields))) or "")


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
    known = _ARGS.get(workflow, _OfOneTurn).model_fields
    return [name for name in args if workflow in _ONE_TURN and name not in known]


def workflow_problems(workflow: str, args: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (argument, problem) for the workflow_args of a built-in workflow."""
    if rules := {**EPISODE_WORKFLOWS, **R3L_WORKFLOWS}.get(workflow):
        yield from rules.problems(args)
    elif kind := _ARGS.get(workflow):
        yield from problems_in(args, kind)


def is_one_sequence(workflow: str, args: dict[str, Any]) -> bool:
    """Tells if a workflow makes one sequence of several turns, which needs a template that keeps history unchanged."""
    if workflow == "tool_call_workflow":
        return True
    rules = {**EPISODE_WORKFLOWS, **R3L_WORKFLOWS}.get(workflow)
    return rules is not None and not args.get("step_wise", rules.step_wise)
