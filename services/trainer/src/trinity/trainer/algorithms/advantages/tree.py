"""Advantages of the turns of episodes that branch: each is compared with the others in its place."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from trinity.plugins import advantage, algorithm
from trinity.runtime.errors import InvalidInput
from trinity.trainer.algorithms.advantages.rollouts import Advantages, Rollouts, by_token, mean_of


@dataclass
class _Rollout:
    """A leaf. It shares the turns before `turn` with `parent`. turns: (turn, sequence, its tokens in the response).
    forks: rollouts that share its turns before another one, by this turn."""

    parent: int | None
    turn: int
    turns: list[tuple[int, int, slice]]
    forks: dict[int, list["_Rollout"]] = field(default_factory=dict)
    before: float = 0.0  # penalties of the turns before `turn`
    own_return: float = 0.0
    returns: list[float] = field(default_factory=list)  # its own and those of all rollouts below
    nodes: dict[int, float] = field(default_factory=dict)  # first turn -> V, by turns


@advantage("tree", source="after TreeRL, arXiv:2506.11902, 3.3")
def tree(rollouts: Rollouts) -> Advantages:
    """V - mean of V over its siblings, at each token of a node; V is the mean return of the rollouts through it.

    A node is the turns of a rollout from one branching to the next. Its siblings continue the same turns; those of the
    first node are the first nodes of all trees of the task. A node without siblings has 0. info.parent is the rollout
    that trains the turns before info.branch_turn; without it, a rollout begins a tree. info.turns has the begin and end
    of each turn among the response's tokens; without it, the sequence is one turn.
    """
    groups: dict[int, dict[int, _Rollout]] = {}
    for steps in rollouts.trajectories():
        number = steps[0] if rollouts.trajectories_N is None else int(rollouts.trajectories_N[steps[0]])
        parent, turn = _branching(rollouts, steps[0], number)
        turns = [one for index in steps for one in _turns(rollouts, index)]
        groups.setdefault(int(rollouts.groups_N[steps[0]]), {})[number] = _Rollout(parent, turn, turns)
    tokens = [torch.zeros(len(mask), dtype=torch.float64) for mask in rollouts.masks]
    for members in groups.values():
        _evaluate(rollouts, members)
        places: dict[tuple[int | None, int], list[float]] = {}
        for number, one in members.items():
            for first, value in one.nodes.items():
                places.setdefault(_place(number, one, first), []).append(value)
        for number, one in members.items():
            for turn, index, part in one.turns:
                if turn < one.turn:
                    continue  # its parent trains it
                first = max(first for first in one.nodes if first <= turn)
                values = places[_place(number, one, first)]
                tokens[index][part] = one.nodes[first] - mean_of(torch.tensor(values, dtype=torch.float64))
    return by_token(rollouts, [found[mask] for found, mask in zip(tokens, rollouts.masks, strict=True)])


def _place(number: int, one: _Rollout, first: int) -> tuple[int | None, int]:
    """The branching at which a node begins, the same for its siblings."""
    return (one.parent if first == one.turn else number), first


def _evaluate(rollouts: Rollouts, members: dict[int, _Rollout]) -> None:
    for number in sorted(members):
        one, above = members[number], None
        if one.parent is not None and (above := members.get(one.parent)) is not None:
            if one.turn <= above.turn:
                raise InvalidInput("info.branch_turn", f"is {one.turn}, and its parent begins at turn {above.turn}")
            above.forks.setdefault(one.turn, []).append(one)
            one.before = above.before + _penalties(rollouts, above, one.turn)
        _, last, _ = max(one.turns)
        one.own_return = float(rollouts.rewards_N[last]) - one.before - _penalties(rollouts, one)
    for number in sorted(members, reverse=True):  # forks have higher numbers
        one = members[number]
        one.returns = [one.own_return]
        for turn in sorted(one.forks, reverse=True):
            one.nodes[turn] = _mean(one.returns)
            one.returns += [value for fork in one.forks[turn] for value in fork.returns]
        one.nodes[one.turn] = _mean(one.returns)


def _mean(values: list[float]) -> float:
    return float(mean_of(torch.tensor(values, dtype=torch.float64)))


def _penalties(rollouts: Rollouts, one: _Rollout, end: int | None = None) -> float:
    """Sums the penalties of the action tokens of the turns that it trains, before turn `end` if given."""
    if rollouts.penalties is None:
        return 0.0
    own = [(index, part) for turn, index, part in one.turns if turn >= one.turn and (end is None or turn < end)]
    return sum(float((rollouts.penalties[index] * rollouts.masks[index])[part].sum()) for index, part in own)


def _of_info(rollouts: Rollouts, index: int, key: str) -> Any:
    """Returns the entry of info; None for a metric of the same name, which is a float."""
    value = rollouts.fact(index, key)
    return None if type(value) is float else value


def _branching(rollouts: Rollouts, index: int, number: int) -> tuple[int | None, int]:
    parent, turn = _of_info(rollouts, index, "parent"), _of_info(rollouts, index, "branch_turn")
    if parent is None and turn is None:
        return None, 0
    if type(parent) is not int or not 0 <= parent < number:
        raise InvalidInput("info.parent", f"is {parent!r:.100}, must be a rollout before {number}")
    if type(turn) is not int or turn < 1:
        raise InvalidInput("info.branch_turn", f"is {turn!r:.100}, must be an integer >= 1")
    return parent, turn


def _turns(rollouts: Rollouts, index: int) -> Iterator[tuple[int, int, slice]]:
    spans, length = _of_info(rollouts, index, "turns"), len(rollouts.masks[index])
    if spans is None:
        yield 0 if rollouts.steps_N is None else int(rollouts.steps_N[index]), index, slice(0, length)
        return
    if not isinstance(spans, list) or not spans or not all(_is_span(span, length) for span in spans):
        raise InvalidInput("info.turns", f"is {spans!r:.100}, must be [begin, end] pairs up to {length}")
    yield from ((turn, index, slice(*span)) for turn, span in enumerate(spans))


def _is_span(span: Any, length: int) -> bool:
    pair = isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span)
    return pair and 0 <= span[0] <= span[1] <= length


algorithm(
    "tree",
    policy_loss="ppo",
    advantage="tree",
    kl_loss="k2",
    entropy_loss="default",
    repeat_times=8,
    note="Meant for episodes that branch.",
)
