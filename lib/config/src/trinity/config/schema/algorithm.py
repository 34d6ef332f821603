"""algorithm: the loss, its parts and the optimizer."""

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from trinity.config.schema.base import Name, PositiveFloat, Range, Section, SmallInt

_Beta = Annotated[float, Field(ge=0, lt=1)]
LossAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class OptimizerConfig(Section):
    """The optimizer and the schedule of its rate."""

    optimizer_type: Literal["adamw", "muon", "adamw_8bit"] = Field(
        "adamw",
        description="muon: matrices by Muon, the rest by AdamW; adamw_8bit: moments in 8 bits (docs/trainer.md)",
    )
    lr: float = Field(1e-6, gt=0, le=1, description="Peak learning rate")
    lr_warmup_steps: int = Field(
        -1, ge=-1, le=1_000_000_000, description="Linear warm-up, in optimizer steps; -1: from the ratio"
    )
    lr_warmup_steps_ratio: float = Field(0.0, ge=0, le=1, description="Warm-up as a part of all steps")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Where cosine and linear end, as a part of lr")
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = Field("constant", description="After the warm-up")
    betas: Annotated[tuple[_Beta, _Beta], Strict(False)] = Field((0.9, 0.999), description="AdamW's betas")
    weight_decay: float = Field(0.01, ge=0, le=100, description="Decoupled weight decay")
    momentum: float = Field(0.95, ge=0, lt=1, description="Muon's momentum, of Nesterov's kind")


class RolloutCorrectionConfig(Section):
    """For experience that the trainer's weights would not sample exactly so: older weights, or the engine's kernels.

    rho is the ratio of the trainer's probability of a token to that of the engine that sampled it.
    """

    decoupled: bool | None = Field(
        None,
        description="Clip around the trainer's weights as the step begins, not the engine's; null: where a batch "
        "makes several updates",
    )
    token_cap: PositiveFloat | None = Field(None, description="Weigh tokens by min(rho, cap); null: off")
    sequence_cap: PositiveFloat | None = Field(
        None, description="Weigh tokens by min(product of their sequence's rho, cap); null: off"
    )
    token_range: Range | None = Field(None, description="Leave out tokens with rho outside; null: off")
    geometric_range: Range | None = Field(
        None, description="Leave out sequences whose geometric mean of rho is outside; null: off"
    )


class AlgorithmConfig(Section):
    """Every `*_fn` is a registered name; its `*_args` are merged over that name's defaults."""

    algorithm_type: str = Field("grpo", description="Registered algorithm; it chooses the parts left null below")
    repeat_times: SmallInt = Field(1, description="Rollouts per task: the group")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    advantage_fn: Name | None = Field(None, description="Advantage function; null: the algorithm's own")
    advantage_fn_args: dict[str, Any] | None = Field(None, description="Its arguments")
    policy_loss_fn: Name | None = Field(None, description="Policy loss; null: the algorithm's own")
    policy_loss_fn_args: dict[str, Any] | None = Field(None, description="Its arguments")
    kl_penalty_fn: Name | None = Field(None, description="KL taken from the reward of each token; null: none")
    kl_penalty_fn_args: dict[str, Any] | None = Field(None, description="Its arguments")
    kl_loss_fn: Name | None = Field(None, description="KL term of the loss; `none` switches it off")
    kl_loss_fn_args: dict[str, Any] | None = Field(None, description="Its arguments")
    entropy_loss_fn: Name | None = Field(None, description="Entropy term of the loss; `none` switches it off")
    entropy_loss_fn_args: dict[str, Any] | None = Field(None, description="Its arguments")
    sample_strategy: Name | None = Field(
        None,
        description="How groups become batches: default, staleness_control or mix (docs/experience.md)",
    )
    sample_strategy_args: dict[str, Any] | None = Field(None, description="Its arguments")
    router_aux_loss_coef: float = Field(
        0.0, ge=0, le=100, description="Weight of the loss that balances a mixture's experts; 0: none"
    )
    enable_router_replay: bool = Field(
        False, description="Send tokens to the experts to which the engine sent them (docs/models.md)"
    )
    loss_agg_mode: LossAggregation | None = Field(None, description="How token losses become one number")
    rollout_correction: RolloutCorrectionConfig = Field(default_factory=RolloutCorrectionConfig)
