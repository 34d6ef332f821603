"""The operators of a run, one after the other, and how much each of them left out: by number and by length."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trinity import plugins
from trinity.api.numbers import real_number
from trinity.buffer.operators import built_in
from trinity.buffer.operators.base import Draft, Operator, check_number
from trinity.config.operators import EXPERIENCE_OPERATORS, experience_operator_problems
from trinity.config.schema.pipeline import OperatorConfig
from trinity.data.experience import Group, Task
from trinity.runtime.errors import InvalidInput, TrinityError

PLACE = "data_processor.experience_pipeline.operators"
PREFIX = "experience_pipeline"

_State = dict[Draft, tuple[float, bool]]  # reward and masked before an operator
_Metrics = dict[str, float]


@dataclass(frozen=True)
class Processed:
    """A group after the operators.

    `drafts` are still in, in the order of their indices; `dropped` are not, and say by whom. `dropped_by` is the
    operator that left the group without any experience, empty if it stays. Metrics are keyed by operator.
    """

    drafts: tuple[Draft, ...]
    metrics: dict[str, float]
    dropped_by: str = ""
    dropped: tuple[Draft, ...] = ()

    @property
    def is_unchanged(self) -> bool:
        """True if the group is trained as it was stored."""
        return not self.dropped and all(d.reward == d.experience.reward and not d.masked for d in self.drafts)


@dataclass
class Counts:
    """Counts of an operator. `experiences` and `response_tokens` by fate: kept (in the loss), masked, dropped.

    Repeated experiences are counted as such and nowhere else.
    """

    groups: int = 0
    dropped_groups: int = 0
    changed: int = 0
    repeated: int = 0
    experiences: Counter[str] = field(default_factory=Counter)
    response_tokens: Counter[str] = field(default_factory=Counter)
    sums: dict[str, float] = field(default_factory=dict)  # of the operator's own metrics
    reported: Counter[str] = field(default_factory=Counter)  # groups that had them

    def add(self, other: "Counts") -> None:
        self.groups += other.groups
        self.dropped_groups += other.dropped_groups
        self.changed += other.changed
        self.repeated += other.repeated
        self.experiences.update(other.experiences)
        self.response_tokens.update(other.response_tokens)
        self.reported.update(other.reported)
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def metrics(self, prefix: str) -> dict[str, float]:
        found = {
            "dropped_groups": float(self.dropped_groups),
            "dropped_experiences": float(self.experiences["dropped"]),
            "masked_experiences": float(self.experiences["masked"]),
            "changed_experiences": float(self.changed),
            "repeated_experiences": float(self.repeated),
        }
        for fate, count in self.experiences.items():
            found[f"response_tokens_{fate}/mean"] = self.response_tokens[fate] / count
        for name, count in self.reported.items():
            found[f"{name}/mean"] = self.sums[name] / count
        return {f"{prefix}/{name}": value for name, value in found.items()}


class Pipeline:
    """The operators of data_processor.experience_pipeline. Raises InvalidInput naming the key that is wrong.

    `names` are those of the YAML; the second of one name is `<name>_2`. An operator gets a group again if the buffer
    restarts before the ledger has it.
    """

    def __init__(self, configs: Sequence[OperatorConfig]) -> None:
        for problem in experience_operator_problems(configs):
            raise InvalidInput(problem.path, problem.message)
        self._operators = [_make(config, f"{PLACE}.{index}") for index, config in enumerate(configs)]
        names = [config.name for config in configs]
        times = [names[: index + 1].count(name) for index, name in enumerate(names)]
        self.names = tuple(name if time == 1 else f"{name}_{time}" for name, time in zip(names, times, strict=True))
        self.totals = {name: Counts() for name in self.names}  # since this process started
        self._interval = {name: Counts() for name in self.names}

    def run(self, group: Group) -> Processed:
        """Runs all operators on a group. Raises InvalidInput naming a failing operator; nothing is counted then."""
        drafts = [Draft(experience, index, experience.reward) for index, experience in enumerate(group.experiences)]
        originals, dropped = set(drafts), list[Draft]()
        counted: dict[str, Counts] = {}
        metrics: dict[str, float] = {}
        dropped_by = ""
        for index, (name, operator) in enumerate(zip(self.names, self._operators, strict=True)):
            try:
                after, left, counts = _apply(operator, drafts, originals, group)
            except (Exception, SystemExit) as error:  # an operator of a plugin may raise anything
                cause = str(error) if isinstance(error, TrinityError) else f"{type(error).__name__}: {error}"
                raise InvalidInput(f"{PLACE}.{index}", f"{name} fails for {group.task.task_id}: {cause}") from error
            for draft in left:
                draft.dropped_by = name
            drafts, dropped, counted[name] = after, dropped + left, counts
            metrics |= {f"{PREFIX}/{name}/{key}": value for key, value in counts.sums.items()}
            if not drafts:
                dropped_by = name
                break
        for name, counts in counted.items():
            self.totals[name].add(counts)
            self._interval[name].add(counts)
        return Processed(tuple(drafts), metrics, dropped_by, tuple(dropped))

    def why_drops(self, name: str) -> str:
        """The reason for which an operator drops groups; empty if it declares none."""
        return str(getattr(self._operators[self.names.index(name)], "drops", ""))

    def metrics(self) -> dict[str, float]:
        """Metrics of every operator since the last call, without operators that saw no group."""
        seen, self._interval = self._interval, {name: Counts() for name in self.names}
        found: dict[str, float] = {}
        for name, counts in seen.items():
            if counts.groups:
                found |= counts.metrics(f"{PREFIX}/{name}")
        return found


def _make(config: OperatorConfig, place: str) -> Operator:
    arguments = EXPERIENCE_OPERATORS.get(config.name)
    kind: Any = getattr(built_in, arguments.__name__) if arguments else plugins.EXPERIENCE_OPERATORS[config.name]
    if not isinstance(kind, type):
        return partial(_call, kind, config.args)
    try:
        operator: Operator = kind(**config.args)
    except TrinityError as error:
        raise InvalidInput(f"{place}.args", str(error)) from error
    except (Exception, SystemExit) as error:
        raise InvalidInput(f"{place}.args", f"{config.name}: {type(error).__name__}: {error}") from error
    return operator


def _call(function: Callable[..., Any], args: dict[str, Any], drafts: list[Draft], task: Task) -> Any:
    """A plugin's function, which takes its arguments with every call."""
    return function(drafts, task, deepcopy(args))


def _apply(
    operator: Operator, drafts: list[Draft], originals: set[Draft], group: Group
) -> tuple[list[Draft], list[Draft], Counts]:
    """Returns the kept drafts, the dropped drafts, and their counts."""
    before: _State = {draft: (draft.reward, draft.masked) for draft in drafts}
    given = list(drafts)
    found = operator(given, group.task)
    after = sorted((draft for draft in given if not draft.dropped_by), key=lambda draft: draft.index)
    check_number(len(after))
    kept = set(after)
    if len(kept) < len(after):
        raise InvalidInput("drafts", "one is in the list twice; repeat it with dataclasses.replace(draft, masked=True)")
    for draft in after:
        if not 0 <= draft.index < len(group.experiences) or draft.experience is not group.experiences[draft.index]:
            raise InvalidInput(f"draft {draft.index}", "has another experience than the group; they stay as stored")
        draft.reward, draft.masked = real_number(draft.reward, f"draft {draft.index}: reward"), bool(draft.masked)
        if not math.isfinite(draft.reward) and math.isfinite(before.get(draft, (0.0, False))[0]):
            raise InvalidInput(f"draft {draft.index}", f"the reward becomes {draft.reward}, must be finite")
    left = [draft for draft in drafts if draft not in kept]
    return after, left, _count(originals, before, after, left, found or {})


def _count(originals: set[Draft], before: _State, after: list[Draft], left: list[Draft], found: _Metrics) -> Counts:
    counts = Counts(groups=1, dropped_groups=int(not after), repeated=sum(draft not in before for draft in after))
    counts.sums = {str(name): real_number(value, f"metrics: {name}") for name, value in found.items()}
    counts.reported.update(counts.sums.keys())
    fates = {draft: "masked" if draft.masked else "kept" for draft in after} | dict.fromkeys(left, "dropped")
    for draft in originals & fates.keys():
        reward, masked = before[draft]
        counts.changed += draft.reward != reward
        if not (masked and fates[draft] == "masked"):  # by an operator before this one
            counts.experiences[fates[draft]] += 1
            counts.response_tokens[fates[draft]] += draft.experience.response_length
    return counts
