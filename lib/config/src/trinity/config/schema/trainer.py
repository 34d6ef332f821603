"""trainer: DeepSpeed and checkpoints."""

from typing import Any, Literal

from pydantic import Field, field_validator

from trinity.config.schema.algorithm import OptimizerConfig
from trinity.config.schema.base import (
    NonNegativeFloat,
    NonNegativeInt,
    OptionalPath,
    PositiveInt,
    Section,
    SmallInt,
    Tokens,
)


class DeepSpeedConfig(Section):
    """The sharding of the training states."""

    zero_stage: Literal[0, 1, 2, 3] = Field(2, description="0: replicate all; 1: shard optimizer; 2: gradients; 3: all")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="Training dtype; auto: bfloat16 on GPUs (float32 master weights), float32 on CPUs"
    )
    offload_optimizer: bool = Field(
        False, description="Keep optimizer states in host memory; needs zero_stage 1 or more"
    )
    offload_param: bool = Field(False, description="Keep parameters in host memory too; needs zero_stage 3")
    offload_reference: bool = Field(False, description="Keep the idle reference model in host memory; not with LoRA")

    @field_validator("zero_stage", mode="before")
    @classmethod
    def _no_bool(cls, value: Any) -> Any:
        """Python takes true for 1."""
        if isinstance(value, bool | float):
            raise ValueError("must be one of 0, 1, 2, 3")
        return value


class CriticConfig(Section):
    """The value model of ppo."""

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="As the policy's")
    warmup_steps: NonNegativeInt = Field(0, description="Steps at the start in which only the critic learns")
    cliprange_value: NonNegativeFloat = Field(0.5, description="Clip range of the value loss; 0: off")
    grad_clip: NonNegativeFloat = Field(1.0, description="Gradient norm limit; 0: off")


class TrainerConfig(Section):
    """The training processes."""

    name: str = Field("trainer", description="Name in logs")
    num_ranks: SmallInt | None = Field(
        None, description="Training processes of each machine; null: the GPUs left, or 1 on CPUs"
    )
    deepspeed: DeepSpeedConfig = Field(default_factory=DeepSpeedConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig, description="Only for ppo")
    total_steps: PositiveInt | None = Field(None, description="Optimizer steps; buffer.total_steps wins")
    save_interval: NonNegativeInt = Field(0, description="Optimizer steps between checkpoints; 0: only the last")
    save_hf_checkpoint: Literal["always", "never", "last"] = Field(
        "last", description="Which checkpoints get a Hugging Face folder with weights"
    )
    max_checkpoints_to_keep: PositiveInt | None = Field(None, description="Older ones are removed; null: keep all")
    checkpoint_storage: list[OptionalPath] = Field(
        default_factory=lambda: ["folder"],
        description="Where checkpoints are put: folder (the job folder), s3://bucket/prefix, or both; ranks on "
        "machines without a shared folder need s3",
    )
    grad_clip: NonNegativeFloat = Field(1.0, description="Gradient norm limit; 0: off")
    freeze_vision_tower: bool = Field(False, description="Train only the language model (docs/vision.md)")
    gradient_checkpointing: bool | Literal["mlp"] | None = Field(
        None,
        description="Recompute activations of whole layers, or only of their MLPs (faster, more memory); null: on "
        "GPUs no more than memory requires, elsewhere whole layers",
    )
    gradient_checkpointing_layers: PositiveInt | None = Field(
        None, description="Number of layers, from the first, that recompute; null: all, or as memory requires"
    )
    fused_kernels: bool | None = Field(
        None,
        description="On GPUs, compiled kernels for norms, gates, rotations and logits; null: for models of 100 M "
        "parameters and more",
    )
    mini_batch_size: PositiveInt | None = Field(None, description="Experiences of one update; null: the whole batch")
    epochs_per_batch: PositiveInt = Field(1, description="Passes over each batch, each in a new order")
    on_bad_step: Literal["stop", "skip"] = Field(
        "stop",
        description="When a value is not finite or memory runs out: end the run, or continue without the batch "
        "(docs/algorithms.md)",
    )
    use_remove_padding: bool = Field(True, description="Micro-batches without padding: sequences one after the other")
    shared_prompts: bool = Field(
        False, description="Equal prompts and longer common prefixes are computed once (docs/trainer.md)"
    )
    use_dynamic_bsz: bool = Field(True, description="Micro-batches by tokens, not by rows")
    max_token_len_per_gpu: Tokens | None = Field(
        None,
        description="Tokens of a micro-batch; null: twice the model's length, on GPUs up to 65,536 where activations "
        "have room",
    )
    micro_batch_size_per_gpu: PositiveInt = Field(
        1, description="Sequences of a micro-batch where use_dynamic_bsz is false"
    )
    ulysses_sequence_parallel_size: SmallInt = Field(1, description="Ranks that share the tokens of each sequence")
    logprob_chunk_tokens: PositiveInt = Field(1024, description="As many logits exist at a time as these tokens have")
    lm_head_float32: bool = Field(True, description="Compute logits in float32 where the model is in bfloat16")
