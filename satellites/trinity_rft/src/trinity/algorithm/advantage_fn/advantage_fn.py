"""Trinity-RFT's advantage functions of groups: they set the advantages of experiences."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn

from trinity.algorithm.declared import Made, arguments, check_kind, declare
from trinity.common.experience import EID, Experience, group_by
from trinity.common.refusals import NotMapped
from trinity.common.registry import Registry
from trinity.plugins.declarations import ADVANTAGES


class AdvantageFn:
    """`process` gets all experiences of a batch; a class that works on veRL's DataProto is refused."""

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {}


class GroupAdvantage(AdvantageFn, ABC):
    """Sets `advantages`, float [R], of the experiences of a group. It may leave some out, or return one twice."""

    def __init__(self, **kwargs: Any) -> None:
        """Takes what subclasses hand on."""

    def group_experiences(self, exps: list[Experience]) -> dict[str, list[Experience]]:
        """Groups experiences by task."""
        return group_by(exps, "task")

    @abstractmethod
    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> tuple[list[Experience], dict]: ...

    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """Computes all groups, one after the other. Metrics are not reported."""
        groups = self.group_experiences(exps).items()
        return [exp for name, group in groups for exp in self.calculate_group_advantage(name, group)[0]], {}


class RolledOut:
    """A sequence of the batch, as far as the trainer has it: an Experience without tokens and texts."""

    def __init__(self, rollouts: Any, index: int) -> None:
        self.index = index
        self.reward = float(rollouts.returns_N[index])
        self.action_mask = rollouts.masks[index]
        self.logprobs = rollouts.logprobs[index].float()
        self.teacher_logprobs = None if rollouts.teachers is None else rollouts.teachers[index]
        self.info = self.metrics = dict(rollouts.facts[index]) if rollouts.facts is not None else {}
        run, step = (None if n is None else int(n[index]) for n in (rollouts.trajectories_N, rollouts.steps_N))
        self.eid = EID(task=int(rollouts.groups_N[index]), run=index if run is None else run, step=step or 0)
        self.advantages: Any = None
        self.returns: Any = None

    @property
    def response_length(self) -> int:
        return len(self.action_mask)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotMapped(f"the experience of an advantage function has no {name!r}", "algorithms")


def _add(name: str, kind: Any) -> None:
    check_kind(name, kind, AdvantageFn, "ADVANTAGE_FN")
    if not hasattr(kind, "process"):
        problem = f"{name!r} of ADVANTAGE_FN has no process(exps); veRL's DataProto is not there"
        raise NotMapped(f"{problem}, derive it from GroupAdvantage", "algorithms")
    make = Made(kind)

    def compute(rollouts: Any, **args: Any) -> Sequence[tuple[int, Any]]:
        """(index, advantages [R]) of each sequence to train."""
        given: list[Any] = [RolledOut(rollouts, index) for index in range(len(rollouts))]
        found, _ = make(args).process(given)
        for exp in found:
            if exp.advantages is None:
                raise NotMapped(f"{kind.__name__} left experience {exp.index} without advantages", "algorithms")
        return [(exp.index, exp.advantages) for exp in found]

    declare(ADVANTAGES, name, kind, compute, arguments(kind))


ADVANTAGE_FN = Registry("ADVANTAGE_FN", _add, lambda: ())
