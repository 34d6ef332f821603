"""Groups for experience operators, and operators run on them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from support.fakes.data.experience import make_task
from trinity.buffer.operators.pipeline import Pipeline, Processed
from trinity.config.schema.pipeline import OperatorConfig
from trinity.data.experience import Experience, Group, VersionSpan

PLACE = "data_processor.experience_pipeline.operators"
KEY = "experience_pipeline"


def experience(reward: float = 0.0, rollout: int = 0, step: int = 0, response: int = 4, **more: Any) -> Experience:
    prompt = more.pop("prompt", 3)
    return Experience(
        rollout=rollout,
        step=step,
        token_ids=np.arange(prompt + response, dtype=np.int32),
        prompt_length=prompt,
        logprobs=np.zeros(response, dtype=np.float32),
        action_mask=np.ones(response, dtype=bool),
        reward=reward,
        version_spans=(VersionSpan(0, 0, response),),
        **more,
    )


def group_of(*experiences: Experience, **task: Any) -> Group:
    return Group(make_task(**task), 1, "tester", experiences, 0.0, 1.0)


def rewarded(*rewards: float, **more: Any) -> Group:
    """A group with one experience for each rollout."""
    return group_of(*(experience(reward, rollout, **more) for rollout, reward in enumerate(rewards)))


def stepwise(*rollouts: Sequence[float]) -> Group:
    """A group with the rewards of each rollout's steps."""
    return group_of(*(experience(r, i, step) for i, rewards in enumerate(rollouts) for step, r in enumerate(rewards)))


def pipeline(*operators: str | tuple[str, dict[str, Any]]) -> Pipeline:
    pairs = [(one, {}) if isinstance(one, str) else one for one in operators]
    return Pipeline([OperatorConfig(name=name, args=args) for name, args in pairs])


def run(group: Group, name: str, **args: Any) -> Processed:
    return pipeline((name, args)).run(group)


def kept(done: Processed) -> list[int]:
    return [draft.index for draft in done.drafts]
