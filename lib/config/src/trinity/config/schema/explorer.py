"""explorer: rollout engines and workflows. synchronizer: when weights travel."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from trinity.config.schema.base import Section


class RolloutModelConfig(Section):
    """The vLLM engines of one explorer."""

    engine_num: PositiveInt = Field(1, description="Engines")
    tensor_parallel_size: PositiveInt = Field(1, description="GPUs of each engine")
    enforce_eager: bool = Field(False, description="No CUDA graphs and no compilation: starts faster, runs slower")
    enable_prefix_caching: bool = Field(True, description="Share key-value blocks of equal prefixes")
    enable_chunked_prefill: bool = Field(True, description="Mix prompt and decode work in one engine step")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Part of each GPU's memory an engine may take")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Engine dtype; auto: bfloat16 on GPUs, float32 on CPUs"
    )
    max_num_seqs: PositiveInt | None = Field(None, description="Sequences decoded together; null: vLLM's own")
    cpu_kvcache_gib: PositiveFloat = Field(1.0, description="Key-value cache of an engine on a CPU, in GiB")
    seed: int = Field(42, description="Seed of an engine's sampler")


class ExplorerConfig(Section):
    name: str = Field("explorer", description="Must differ between explorers of one run")
    runner_per_model: PositiveInt = Field(8, description="Tasks worked on at the same time, per engine")
    max_timeout: PositiveFloat = Field(1800, description="Longest attempt at a task, in seconds")
    max_retry_times: NonNegativeInt = Field(2, description="Attempts after the first before a task is given up")
    eval_interval: PositiveInt = Field(100, description="Optimizer steps between evaluations")
    eval_on_startup: bool = Field(True, description="Evaluate the base model first")
    rollout_model: RolloutModelConfig = Field(default_factory=RolloutModelConfig)


class SynchronizerConfig(Section):
    sync_method: Literal["nccl", "checkpoint", "memory"] = Field("nccl", description="How weights travel")
    sync_style: Literal["fixed"] = Field("fixed", description="Who decides when")
    sync_interval: PositiveInt = Field(1, description="Optimizer steps between weight versions")
    sync_offset: NonNegativeInt = Field(0, description="Batches explorers may be ahead")
    sync_timeout: PositiveFloat = Field(3600, description="Longest wait for the other side, in seconds")
