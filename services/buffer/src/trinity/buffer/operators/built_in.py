"""The built-in operators: filters and rewards, the parts of DAPO (arXiv:2503.14476), RAFT, OPMD, text filters.

Each extends the class of its arguments, which has its name.
"""

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import yaml

from trinity.buffer.operators.base import Draft, check_number, drop_all, rollouts
from trinity.config import operators
from trinity.data.experience import Task, Truncation
from trinity.runtime.errors import InvalidInput


class RewardFilter(operators.RewardFilter):
    """Keeps experiences with reward >= threshold; each step of a rollout by its own reward."""

    drops: ClassVar[str] = "rewards below the threshold"

    def __call__(self, drafts: list[Draft], task: Task) -> None:
        drop_all([draft for draft in drafts if not draft.reward >= self.threshold])


class RewardStdFilter(operators.RewardStdFilter):
    """Drops the group if the population standard deviation of its rollouts' rewards is <= threshold."""

    drops: ClassVar[str] = "no reward variance"

    def __call__(self, drafts: list[Draft], task: Task) -> dict[str, float]:
        deviation = statistics.pstdev(rollout.reward for rollout in rollouts(drafts))  # exactly 0 for equal rewards
        if deviation <= self.threshold:
            drop_all(drafts)
        return {"reward_std": deviation}


class InvalidRewardFilter(operators.InvalidRewardFilter):
    """Drops experiences whose reward, or one of `required_metrics`, is not a finite number."""

    drops: ClassVar[str] = "rewards or metrics that are not finite"

    def __call__(self, drafts: list[Draft], task: Task) -> None:
        for draft in drafts:
            needed = [draft.reward, *(draft.metrics.get(name, math.nan) for name in self.required_metrics)]
            if not all(math.isfinite(value) for value in needed):
                draft.drop()


class PassRateCalculator(operators.PassRateCalculator):
    """The share of the task's rollouts that passed: reward >= threshold, or reward > 0 without one. Changes nothing."""

    def __call__(self, drafts: list[Draft], task: Task) -> dict[str, float]:
        rate = statistics.fmean(self._passed(rollout.reward) for rollout in rollouts(drafts))
        return {"pass_rate": rate, f"{task.taskset}/pass_rate": rate}

    def _passed(self, reward: float) -> bool:
        return reward > 0 if self.threshold is None else reward >= self.threshold


OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "ADD": lambda reward, value: reward + value,
    "SUB": lambda reward, value: reward - value,
    "MUL": lambda reward, value: reward * value,
    "DIV": lambda reward, value: reward / value,
}


class RewardShapingMapper(operators.RewardShapingMapper):
    """reward = reward <op_type> weight * metric, for each config in turn: {stats_key, op_type: ADD, weight: 1.0}.

    `stats_key` names a metric of the experience, which an earlier operator may have added. Raises InvalidInput for
    a metric that is missing and for a division by 0.
    """

    def __call__(self, drafts: list[Draft], task: Task) -> None:
        for draft in drafts:
            for config in self.reward_shaping_configs:
                key, operation = config.stats_key, config.op_type
                value = config.weight * draft.metric(key)
                if operation == "DIV" and value == 0:
                    raise InvalidInput(
                        f"metrics.{key}", f"is 0 in experience {draft.index}; the reward cannot be divided"
                    )
                draft.reward = OPERATIONS[operation](draft.reward, value)


class DynamicSamplingFilter(operators.DynamicSamplingFilter):
    """Keeps a group only if some of its rollouts are right and some are not (section 3.2, equation 11).

    0 < #(metric > correct_threshold) < G, of each rollout's last step. A group of one is dropped. The metric is looked
    at and not the reward, which may be shaped by length; in a group where no rollout has the metric, the reward as it
    was stored takes its place. Raises InvalidInput if only some of them have it.
    """

    drops: ClassVar[str] = "no reward variance: all rollouts of a group are right, or all wrong"

    def __call__(self, drafts: list[Draft], task: Task) -> dict[str, float]:
        last = [rollout.last for rollout in rollouts(drafts)]
        known = [draft for draft in last if self.metric_key in draft.metrics]
        if known and len(known) < len(last):
            raise InvalidInput(
                f"metrics.{self.metric_key}", f"is in {len(known)} of the group's {len(last)} rollouts only"
            )
        scores = [draft.metrics[self.metric_key] if known else draft.experience.reward for draft in last]
        right = sum(score > self.correct_threshold for score in scores)
        if not 0 < right < len(last):
            drop_all(drafts)
        return {"all_right": float(right == len(last)), "all_wrong": float(right == 0)}


class MaskResponseTruncated(operators.MaskResponseTruncated):
    """No token of a response that ended at its limit enters the loss: overlong filtering, section 3.4."""

    def __call__(self, drafts: list[Draft], task: Task) -> None:
        for draft in drafts:
            if draft.experience.truncation is Truncation.RESPONSE:
                draft.masked = True


class OverlongRewardShaping(operators.OverlongRewardShaping):
    """Soft overlong punishment: reward += penalty_factor * R_length (section 3.4, equation 13).

    R_length = 0 for |y| <= L - c, ((L - c) - |y|) / c for L - c < |y| <= L, -1 beyond, where |y| is the experience's
    response in tokens, L max_response_length (the task's limit, unless given) and c cache_length (a fifth of L, as in
    the paper, unless given).
    """

    def __call__(self, drafts: list[Draft], task: Task) -> dict[str, float]:
        limit = self.max_response_length or task.sampling.max_tokens
        cache = self.cache_length or max(1, limit // 5)
        penalties = []
        for draft in drafts:
            over = (draft.experience.response_length - (limit - cache)) / cache
            penalties.append(self.penalty_factor * min(1.0, max(0.0, over)))
            draft.reward -= penalties[-1]
        return {"penalty": statistics.fmean(penalties)}


class RaftFilter(operators.RaftFilter):
    """Keeps the `k` best rollouts of the group whose reward is > threshold; the earlier of equal ones.

    Best-of-K sampling of RAFT (arXiv:2304.06767, section 3.2), which then learns from them by supervised fine-tuning.
    """

    drops: ClassVar[str] = "no reward above the threshold"

    def __call__(self, drafts: list[Draft], task: Task) -> None:
        ranked = sorted(rollouts(drafts), key=lambda rollout: -rollout.reward)
        for rank, rollout in enumerate(ranked):
            if rank >= self.k or not rollout.reward > self.threshold:
                drop_all(rollout.drafts)


class OpmdFilter(operators.OpmdFilter):
    """Drops placeholders: prompts shorter than `min_prompt_length` tokens, rewards that are not finite, and experiences
    whose info says `valid: false`. OPMD learns from every other one, also from groups without differences.
    """

    drops: ClassVar[str] = "placeholders"

    def __call__(self, drafts: list[Draft], task: Task) -> None:
        for draft in drafts:
            experience = draft.experience
            short = experience.prompt_length < self.min_prompt_length
            if short or not math.isfinite(draft.reward) or not _is_valid(experience.info_json):
                draft.drop()


def _is_valid(info_json: str) -> bool:
    info = json.loads(info_json or "{}")
    return not isinstance(info, dict) or bool(info.get("valid", True))


class MultiStepPadding(operators.MultiStepPadding):
    """Every rollout of the group gets the same number of experiences: its last step again, masked, as often as needed.

    That number is `max_steps`, or with 0 that of the group's longest rollout; longer rollouts stay as they are. A
    repeated step trains nothing and has the last step's reward, so a mean over the group's experiences counts every
    rollout the same, however many steps it took.
    """

    def __call__(self, drafts: list[Draft], task: Task) -> None:
        found = rollouts(drafts)
        wanted = self.max_steps or max(len(rollout.drafts) for rollout in found)
        check_number(sum(max(wanted, len(rollout.drafts)) for rollout in found))
        for rollout in found:
            drafts += [replace(rollout.last, masked=True) for _ in range(wanted - len(rollout.drafts))]


class DataJuicer(operators.DataJuicer):
    """Drops what one of Data-Juicer's filters would: `operators` as in its recipes, or the recipe at `config_path`.

    Columns are `text` and `response`, the response, `prompt` and `query`, the prompt; `text_key` of a filter names one.
    Numbers that filters find become metrics of the experience, for operators that follow. Raises InvalidInput for what
    is no filter, and without the package.
    """

    drops: ClassVar[str] = "texts that the filters refuse"

    _stats: str
    _filters: list[Any]

    def model_post_init(self, context: Any) -> None:
        try:
            from data_juicer.ops import load_ops
            from data_juicer.utils.constant import Fields
        except ImportError as error:
            install = "install it with: .venv/bin/pip install py-data-juicer"
            raise InvalidInput("data_juicer", f"needs the package py-data-juicer ({error}); {install}") from error
        given = self.operators or yaml.safe_load(Path(self.config_path).expanduser().read_text())["process"]
        self._stats = Fields.stats
        self._filters = load_ops([{name: args or {} for name, args in operator.items()} for operator in given])
        for operator, found in zip(given, self._filters, strict=True):
            if not hasattr(found, "compute_stats_batched"):
                raise InvalidInput("operators", f"{next(iter(operator))} is no filter; tokens are trained as sampled")

    def __call__(self, drafts: list[Draft], task: Task) -> dict[str, float]:
        prompts = [draft.experience.prompt_text for draft in drafts]
        responses = [draft.experience.response_text for draft in drafts]
        columns: dict[str, list[Any]] = {"text": responses, "response": responses, "prompt": prompts, "query": prompts}
        means: dict[str, float] = {}
        for one in self._filters:
            columns[self._stats] = [{} for _ in drafts]  # fresh: a filter skips what it finds, also of another column
            columns = one.compute_stats_batched(columns)
            numbers: dict[str, list[float]] = {}
            for draft, stats, keep in zip(drafts, columns[self._stats], one.process_batched(columns), strict=True):
                if not keep:
                    draft.drop()
                for name, value in stats.items():
                    if isinstance(value, int | float):
                        draft.metrics[name] = float(value)
                        numbers.setdefault(name, []).append(float(value))
            means |= {name: statistics.fmean(values) for name, values in numbers.items()}
        return means
