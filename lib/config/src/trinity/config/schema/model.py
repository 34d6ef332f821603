"""model: the policy and its lengths. cluster: the machines."""

import re
from typing import Any, Literal

from pydantic import Field

from trinity.config.schema.base import (
    NonNegativeInt,
    OptionalPath,
    PositiveFloat,
    PositiveInt,
    Section,
    SmallInt,
    Temperature,
    Tokens,
)

NAMES_EXPERTS = re.compile(r"\bexperts\b")


class LoraConfig(Section):
    """Low-rank adapters that train in place of the model: W + lora_alpha / lora_rank * B A."""

    path: OptionalPath | None = Field(None, description="Folder of peft with initial adapters; null: new adapters")
    lora_rank: SmallInt | None = Field(
        None, description="Rows of A and columns of B, for each expert; null: that of path, or 32"
    )
    lora_alpha: PositiveFloat | None = Field(
        None, description="The product of B and A counts lora_alpha / lora_rank times; null: that of path, or 32"
    )
    lora_dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="Dtype of the adapters; auto, or what trainer.deepspeed.dtype is"
    )
    target_modules: str | list[str] | None = Field(
        None,
        description="Last parts of the names of linear layers (`experts`: those of a mixture), or a regex of whole "
        "names; null: those of path, or all-linear, which leaves experts out",
    )
    exclude_modules: str | list[str] | None = Field(None, description="Left out of target_modules; named like them")

    load_in_4bit: bool = Field(
        False,
        description="QLoRA: the trainer holds the frozen linear layers in four bits (NF4), engines their rounded "
        "values (docs/weights.md)",
    )
    merged: bool = Field(
        True,
        description="true: engines add each version to the base weights; false: they keep its adapters apart and swap "
        "versions without a pause (docs/weights.md)",
    )

    @property
    def rank(self) -> int:
        """The rank of new adapters."""
        return self.lora_rank or 32

    @property
    def alpha(self) -> float:
        """The alpha of new adapters."""
        return self.lora_alpha or 32.0

    @property
    def targets(self) -> str | list[str]:
        """The layers that get new adapters."""
        return "all-linear" if self.target_modules is None else self.target_modules

    @property
    def names_experts(self) -> bool:
        """True if target_modules names a mixture's experts."""
        named = [self.targets] if isinstance(self.targets, str) else self.targets
        return any(map(NAMES_EXPERTS.search, named))


class RopeScalingConfig(Section):
    """Rotary positions beyond the model's original length, in place of its config.json's.

    Only kinds that vLLM and transformers compute alike, so no kind that follows the length of a prompt.
    """

    rope_type: Literal["default", "linear", "yarn", "llama3"] = Field(description="How positions are scaled")
    factor: float | None = Field(None, ge=1, le=10_000, description="How many times longer (linear, yarn, llama3)")
    original_max_position_embeddings: PositiveInt | None = Field(
        None, description="In tokens (yarn, llama3); null: max_position_embeddings of the model"
    )
    low_freq_factor: PositiveFloat | None = Field(None, description="llama3")
    high_freq_factor: PositiveFloat | None = Field(None, description="llama3")
    beta_fast: PositiveFloat | None = Field(None, description="yarn; null: 32")
    beta_slow: PositiveFloat | None = Field(None, description="yarn; null: 1")


class ModelConfig(Section):
    """The policy. Two of max_model_len, max_prompt_tokens and max_response_tokens give the third.

    If only max_model_len is given, each part gets half of it; without all three, each part gets 2048 tokens.
    """

    model_path: OptionalPath = Field("", description="Folder or hub name of the policy")
    critic_model_path: OptionalPath = Field("", description="Folder or hub name of the critic (ppo); empty: model_path")
    trust_remote_code: bool = Field(False, description="Let transformers and vLLM run the model folder's own code")
    custom_chat_template: str | None = Field(None, description="Chat template (Jinja) in place of the tokenizer's own")
    chat_template_path: OptionalPath | None = Field(
        None, description="File with the chat template; wins over the string"
    )
    enable_thinking: bool | None = Field(None, description="Variable of the chat template; null: not set")
    temperature: Temperature = Field(1.0, description="Rollout temperature")
    top_p: float = Field(1.0, gt=0, le=1, description="Rollout nucleus mass")
    top_k: int = Field(-1, ge=-1, le=10_000_000, description="Rollout top-k; -1: off")
    repetition_penalty: PositiveFloat = Field(1.0, description="Rollout repetition penalty; 1: off")
    max_model_len: Tokens | None = Field(None, description="Prompt and response together, in tokens")
    max_prompt_tokens: Tokens | None = Field(None, description="Longest prompt, in tokens")
    max_response_tokens: Tokens | None = Field(None, description="Longest response, in tokens")
    min_response_tokens: NonNegativeInt = Field(0, description="Shortest response, in tokens")
    rope_scaling: RopeScalingConfig | None = Field(None, description="Of policy and reference; null: the model's own")
    rope_theta: PositiveFloat | None = Field(None, description="Base of the rotary positions; null: the model's own")
    images: bool | None = Field(
        None, description="Read images, where docs/vision.md names the model; null: Qwen2.5-VL and Qwen3-VL do"
    )
    lora_configs: list[LoraConfig] | None = Field(
        None, max_length=1, description="Train adapters, not the model (docs/weights.md); at most one entry"
    )

    @property
    def rope(self) -> dict[str, Any]:
        """Settings that replace the model's rotary positions, by transformers' names."""
        scaling = {} if self.rope_scaling is None else self.rope_scaling.model_dump(exclude_none=True)
        return scaling if self.rope_theta is None else {**scaling, "rope_theta": self.rope_theta}

    @property
    def lora(self) -> LoraConfig | None:
        """The adapters that train; None: the whole model does."""
        return self.lora_configs[0] if self.lora_configs else None

    @property
    def in_four_bits(self) -> bool:
        """True if the policy's base is held in four bits."""
        return self.lora is not None and self.lora.load_in_4bit


class ClusterConfig(Section):
    """The machines of the run."""

    node_num: int = Field(
        0,
        ge=0,
        le=10_000,
        description="Machines of the trainer; each beyond the first joins by mode train_node (docs/modes.md). 0: one",
    )
    gpu_per_node: int = Field(0, ge=0, le=1_000, description="GPUs of each; 0: all that are there")
    least_nodes: int | None = Field(
        None, ge=1, le=10_000, description="Fewest machines that continue the training; null: node_num"
    )
    node_wait: float = Field(
        600, ge=0, le=1_000_000, description="Seconds, at least 3, to wait for further machines beyond least_nodes"
    )
    node_timeout: float = Field(
        20, ge=3, le=10_000, description="Seconds of silence after which a machine counts as lost, or a stopped rank"
    )
    progress_timeout: float = Field(
        600,
        ge=5,
        le=100_000,
        description="Seconds without progress in common work of ranks, before they count as hung (docs/modes.md)",
    )
    node_name: str = Field(
        "", max_length=100, description="Name of this machine of the trainer; empty: its identity's, or the host's"
    )
    network_interface: str = Field(
        "",
        max_length=15,
        description="Interface on which gloo and NCCL listen between machines; empty: that of the route to the others",
    )

    @property
    def nodes(self) -> int:
        """Machines of the trainer, 1 or more."""
        return max(1, self.node_num)

    @property
    def fewest_nodes(self) -> int:
        """Fewest machines that continue the training."""
        return min(self.least_nodes or self.nodes, self.nodes)

    @property
    def gpus(self) -> int:
        """GPUs of all machines together; 0 if the YAML has none."""
        return self.nodes * self.gpu_per_node
