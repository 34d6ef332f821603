"""Arguments of the built-in experience operators, by name. The buffer implements them (docs/operators.md)."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from trinity import plugins
from trinity.config.errors import OF_PLUGINS, Problem
from trinity.config.hints import problems_in
from trinity.config.schema.base import Arguments, NonNegativeFloat, NonNegativeInt, PositiveInt
from trinity.config.schema.pipeline import OperatorConfig

Number = Annotated[float, Field(ge=-1e12, le=1e12)]


class RewardFilter(Arguments):
    threshold: Number = 0.0


class RewardStdFilter(RewardFilter):
    pass


class InvalidRewardFilter(Arguments):
    required_metrics: list[str] = Field(default_factory=list)


class PassRateCalculator(Arguments):
    threshold: Number | None = None


class Shaping(Arguments):
    """One change of a reward by a metric of its experience."""

    stats_key: str
    op_type: Literal["ADD", "SUB", "MUL", "DIV"] = "ADD"
    weight: Number = 1.0

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.op_type == "DIV" and self.weight == 0:
            raise ValueError("must have no weight of 0 for DIV")
        return self


class RewardShapingMapper(Arguments):
    reward_shaping_configs: list[Shaping] = Field(default_factory=list)


class DynamicSamplingFilter(Arguments):
    metric_key: str = "accuracy"
    correct_threshold: Number = 0.0


class MaskResponseTruncated(Arguments):
    pass


class OverlongRewardShaping(Arguments):
    max_response_length: PositiveInt | None = None
    cache_length: PositiveInt | None = None
    penalty_factor: NonNegativeFloat = 1.0

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.cache_length and self.max_response_length and self.cache_length > self.max_response_length:
            raise ValueError(f"must have a cache_length of at most max_response_length = {self.max_response_length}")
        return self


class MultiStepPadding(Arguments):
    max_steps: NonNegativeInt = 0


class RaftFilter(Arguments):
    k: PositiveInt = 1
    threshold: Number = 0.0


class OpmdFilter(Arguments):
    min_prompt_length: int = 3


def _one_name(operator: dict[str, dict[str, Any] | None]) -> dict[str, dict[str, Any] | None]:
    if len(operator) != 1:
        raise ValueError("must be one name with its arguments: - text_length_filter: {min_len: 5}")
    return operator


class DataJuicer(Arguments):
    operators: list[Annotated[dict[str, dict[str, Any] | None], AfterValidator(_one_name)]] = Field(
        default_factory=list
    )
    config_path: str = ""

    @model_validator(mode="after")
    def _given(self) -> Self:
        if not self.operators and not self.config_path:
            raise ValueError("must have operators, Data-Juicer's, or config_path, a recipe of them")
        return self


EXPERIENCE_OPERATORS: dict[str, type[Arguments]] = {
    "reward_filter": RewardFilter,
    "reward_std_filter": RewardStdFilter,
    "invalid_reward_filter": InvalidRewardFilter,
    "pass_rate_calculator": PassRateCalculator,
    "reward_shaping_mapper": RewardShapingMapper,
    "dapo_dynamic_sampling_filter": DynamicSamplingFilter,
    "dapo_dynamic_sampling": DynamicSamplingFilter,
    "DAPODynamicSamplingFilter": DynamicSamplingFilter,
    "mask_response_truncated": MaskResponseTruncated,
    "MaskResponseTruncatedOperator": MaskResponseTruncated,
    "overlong_reward_shaping": OverlongRewardShaping,
    "multi_step_padding": MultiStepPadding,
    "raft_filter": RaftFilter,
    "RAFT_filter": RaftFilter,
    "opmd_filter": OpmdFilter,
    "OPMD_filter": OpmdFilter,
    "data_juicer": DataJuicer,
}


def experience_operator_problems(operators: Sequence[OperatorConfig]) -> Iterator[Problem]:
    """Problems of data_processor.experience_pipeline.operators. Operators of plugins take any arguments."""
    known = {*EXPERIENCE_OPERATORS, *plugins.EXPERIENCE_OPERATORS}
    for index, operator in enumerate(operators):
        place = f"data_processor.experience_pipeline.operators.{index}"
        if operator.name not in known:
            names = f"{', '.join(sorted(known))} {OF_PLUGINS}"
            yield Problem(f"{place}.name", f"is {operator.name!r}, which is not registered; known: {names}")
        elif kind := EXPERIENCE_OPERATORS.get(operator.name):
            for argument, problem in problems_in(operator.args, kind):
                yield Problem(f"{place}.args.{argument}".rstrip("."), problem)
