"""Stored groups with other rewards: what a reward function needs of them, and what its rewards change."""

import fnmatch
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trinity.data.experience import Experience, Group, Truncation
from trinity.data.prompts import reference_answers, references_for
from trinity.reading.errors import RunError

WITHOUT_TASK, WITHOUT_EXPLORER, WITHOUT_VERSION, NOT_GRADED, SKIPPED = (
    "without_task", "without_explorer", "without_version", "not_graded", "skipped_step",
)  # fmt: skip
_SAME = 1e-9
_MOST_TASKS = 10

Scored = Sequence[tuple[float, dict[str, float]]]  # reward and metrics of each experience
Score = Callable[[Sequence[dict[str, Any]]], Awaitable[Scored]]


class NotRecorded(RunError):
    """The log lacks what a reward function needs."""


@dataclass(frozen=True)
class LeftOut:
    """Groups that enter no batch: of tasks (ids or patterns), of explorers, of ranges of the parent's versions."""

    tasks: tuple[str, ...] = ()
    explorers: tuple[str, ...] = ()
    versions: tuple[range, ...] = ()

    def given(self) -> list[tuple[str, str]]:
        """Returns reason and pattern of each filter; versions as FIRST-LAST."""
        return [
            *((WITHOUT_TASK, one) for one in self.tasks),
            *((WITHOUT_EXPLORER, one) for one in self.explorers),
            *((WITHOUT_VERSION, _text(one)) for one in self.versions),
        ]

    def matches(self, task_id: str, explorer_id: str, oldest: int, newest: int) -> list[tuple[str, str]]:
        """Returns reason and pattern of each filter that a group matches, whose versions are `oldest` to `newest`."""
        return [
            *((WITHOUT_TASK, one) for one in self.tasks if fnmatch.fnmatchcase(task_id, one)),
            *((WITHOUT_EXPLORER, one) for one in self.explorers if one == explorer_id),
            *((WITHOUT_VERSION, _text(one)) for one in self.versions if oldest < one.stop and newest >= one.start),
        ]

    def of(self, group: Group) -> list[tuple[str, str]]:
        """Returns the filters that a stored group matches, as `matches` does."""
        return self.matches(group.task.task_id, group.explorer_id, *group.versions)

    def reason(self, group: Group) -> str:
        """Returns why a group is left out; empty if it is not."""
        return next((reason for reason, _ in self.of(group)), "")


def _text(versions: range) -> str:
    return f"{versions.start}-{versions.stop - 1}"


async def rescored(group: Group, function: str, score: Score) -> Scored:
    """Returns reward and metrics of each experience. With several reference answers, the best score counts.

    Experiences whose prompt was cut stay as they are. Raises NotRecorded, or RunError if the function fails.
    """
    answered = [one for one in group.experiences if one.truncation is not Truncation.PROMPT]
    if problem := _not_recorded(group, answered):
        raise NotRecorded(f"task {group.task.task_id}: {problem}", 2)
    row = json.loads(group.task.row_json)
    truths = references_for(function, _truths(row, group))
    found: list[Scored] = [await score([_item(one, truth, row) for one in answered]) for truth in truths]
    best = iter([max(scores, key=lambda each: each[0]) for scores in zip(*found, strict=True)])
    return [(one.reward, {}) if one.truncation is Truncation.PROMPT else next(best) for one in group.experiences]


def _not_recorded(group: Group, experiences: Sequence[Experience]) -> str:
    """Returns what a reward function needs and the log lacks."""
    workflow = group.task.workflow
    counts = Counter(one.rollout for one in group.experiences)
    if any(count > 1 for count in counts.values()) or any('"group"' in one.info_json for one in experiences):
        return (
            f"{workflow} stores a rollout as several experiences, and its environment gave the rewards: the log has no "
            "answer that a reward function could score"
        )
    if any(not one.prompt_text for one in experiences):
        return f"{workflow} recorded no texts: the log has tokens, and a reward function scores the text of an answer"
    return ""


def _truths(row: dict[str, Any], group: Group) -> list[str]:
    name = json.loads(group.task.format_json or "{}").get("response_key") or ""
    try:
        return reference_answers(row[name]) if name in row else [""]
    except ValueError as error:
        raise NotRecorded(f"task {group.task.task_id}: its reference answer, column {name}, {error}", 2) from None


def _item(one: Experience, truth: str, row: dict[str, Any]) -> dict[str, Any]:
    """The fields of environment.v1.ScoreItem."""
    return {
        "prompt": one.prompt_text,
        "response": one.response_text,
        "truth": truth,
        "task_json": json.dumps(row),
        "truncated": one.truncation is Truncation.RESPONSE,
        "response_tokens": one.response_length,
        "response_token_ids": one.token_ids[one.prompt_length :].tolist(),
    }


@dataclass
class Changes:
    """What other rewards change. Advantages are GRPO's: (reward - mean of the group) / its standard deviation.

    `reordered`: groups in which two rollouts, of different rewards before or after, compare otherwise. `flipped`:
    rollouts whose advantage has the other sign, or is no longer 0, or is 0 now. `tasks`: those whose rewards change
    most, with the sum of the differences' sizes. `failures` by error.
    """

    groups: int = 0
    rollouts: int = 0
    rewards_changed: int = 0
    groups_changed: int = 0
    reordered: int = 0
    flipped: int = 0
    without_signal: int = 0  # groups whose rewards are all equal now
    reward_before: float = 0.0
    reward_after: float = 0.0
    advantage_difference: float = 0.0
    left_out: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    _by_task: list[dict[str, Any]] = field(default_factory=list)

    def add(self, group: Group, after: Sequence[float]) -> None:
        """Counts a group that is trained."""
        old, new = np.array([one.reward for one in group.experiences]), np.array(after, float)
        moved = np.abs(new - old) > _SAME
        was, now = _advantages(old), _advantages(new)
        self.groups += 1
        self.rollouts += len(old)
        self.rewards_changed += int(moved.sum())
        self.groups_changed += bool(moved.any())
        self.without_signal += bool(np.ptp(new) <= _SAME)
        self.reordered += bool((_order(old) != _order(new)).any())
        self.flipped += int((np.sign(was) != np.sign(now)).sum())
        self.reward_before += float(old.sum())
        self.reward_after += float(new.sum())
        self.advantage_difference += float(np.abs(now - was).sum())
        if moved.any():
            before, mean = float(old.mean()), float(new.mean())
            size = float(np.abs(new - old).sum())
            self._by_task.append({"task": group.task.task_id, "before": before, "after": mean, "difference": size})

    def as_json(self) -> dict[str, Any]:
        rollouts = max(1, self.rollouts)
        worst = sorted(self._by_task, key=lambda one: (-one["difference"], one["task"]))
        return {
            "groups": self.groups,
            "groups_changed": self.groups_changed,
            "groups_reordered": self.reordered,
            "groups_without_signal": self.without_signal,
            "rollouts": self.rollouts,
            "rewards_changed": self.rewards_changed,
            "advantages_of_other_sign": self.flipped,
            "advantage_difference_mean": self.advantage_difference / rollouts,
            "reward_before": self.reward_before / rollouts,
            "reward_after": self.reward_after / rollouts,
            "left_out": dict(self.left_out),
            "failures": dict(self.failures.most_common(5)),
            "tasks": worst[:_MOST_TASKS],
        }


def _advantages(rewards: np.ndarray) -> np.ndarray:
    spread = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
    return np.where(spread > _SAME, (rewards - rewards.mean()) / max(spread, _SAME), 0.0)


def _order(rewards: np.ndarray) -> np.ndarray:
    """How each pair of rollouts compares: -1, 0 or 1."""
    difference = rewards[:, None] - rewards[None, :]
    return np.where(np.abs(difference) > _SAME, np.sign(difference), 0.0)
