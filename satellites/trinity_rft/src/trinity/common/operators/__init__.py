"""Experience operators in Trinity-RFT's form: they get the experiences of one group, and return those to train."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from trinity import plugins
from trinity.api.numbers import real_number
from trinity.common.experience import EID
from trinity.common.refusals import NotMapped
from trinity.common.registry import Registry
from trinity.config.operators import EXPERIENCE_OPERATORS as BUILT_IN

__all__ = ["EXPERIENCE_OPERATORS", "ExperienceOperator"]

_ANCHOR = "experience-operators"
_AS_STORED = ("tokens", "logprobs", "prompt_length", "advantages")


class ExperienceOperator(ABC):
    """Made once with the YAML's args, and called for every group."""

    @abstractmethod
    def process(self, exps: list[Any]) -> tuple[list[Any], dict[str, float]]: ...


class StoredExperience:
    """An Experience as the buffer has it: arrays are numpy's, since the buffer has no torch."""

    def __init__(self, draft: Any, task: Any) -> None:
        stored = draft.experience
        self.draft = draft
        self.tokens, self.prompt_length, self.logprobs = stored.token_ids, stored.prompt_length, stored.logprobs
        self.action_mask = np.zeros_like(stored.action_mask) if draft.masked else stored.action_mask.copy()
        self.reward, self.metrics = draft.reward, dict(draft.metrics)
        self.prompt_text, self.response_text = stored.prompt_text, stored.response_text
        self.eid = EID(batch=task.ordinal, task=task.task_id, run=stored.rollout, step=stored.step)
        names = {"PROMPT": "prompt_truncated", "RESPONSE": "response_truncated"}
        self.truncate_status = names.get(stored.truncation.name)
        self.info: dict[str, Any] = json.loads(stored.info_json or "{}")
        if stored.version_spans:
            self.info["model_version"] = stored.version_spans[-1].version
        self.advantages: Any = None
        self._as_stored = {name: getattr(self, name) for name in _AS_STORED}

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotMapped(f"the experience of an operator has no {name!r}", _ANCHOR)

    def apply(self) -> None:
        """Writes the operator's changes to the draft. Raises NotMapped for a change of a field that stays as stored."""
        for name, value in self._as_stored.items():
            if getattr(self, name) is not value:
                raise NotMapped(f"an operator sets {name}, which stays as it is stored", _ANCHOR)
        mask = np.asarray(self.action_mask, bool)
        if mask.any() and not np.array_equal(mask, self.draft.experience.action_mask):
            raise NotMapped("an operator masks a part of the tokens; it can mask all of them", _ANCHOR)
        self.draft.reward, self.draft.masked = real_number(self.reward, "reward"), not mask.any()
        self.draft.metrics |= {name: real_number(value, f"metrics: {name}") for name, value in self.metrics.items()}


def _adapted(kind: type[ExperienceOperator]) -> Any:
    class Adapted:
        def __init__(self, **args: Any) -> None:
            self._operator = kind(**args)

        def __call__(self, drafts: Sequence[Any], task: Any) -> dict[str, float]:
            given = [StoredExperience(draft, task) for draft in drafts]
            found, metrics = self._operator.process(list(given))
            if len({id(exp) for exp in found}) != len(found) or not all(any(e is g for g in given) for e in found):
                raise NotMapped(f"{kind.__name__} returns other experiences than it was given, or one twice", _ANCHOR)
            for exp in given:
                if any(exp is kept for kept in found):
                    exp.apply()
                else:
                    exp.draft.drop()
            return {name: float(value) for name, value in (metrics or {}).items() if isinstance(value, int | float)}

    Adapted.__module__, Adapted.__qualname__ = kind.__module__, kind.__qualname__
    return Adapted


def _add(name: str, kind: Any) -> None:
    if not (isinstance(kind, type) and issubclass(kind, ExperienceOperator)):
        raise NotMapped(f"{name!r} is registered for {kind!r}; derive it from ExperienceOperator", _ANCHOR)
    plugins.experience_operator(name)(_adapted(kind))


EXPERIENCE_OPERATORS = Registry("EXPERIENCE_OPERATORS", _add, lambda: BUILT_IN)
