"""explorer: rollout engines and workflows. synchronizer: when weights travel."""

import ipaddress
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from trinity.config.schema.base import (
    AnyPath,
    EnvironmentText,
    FolderName,
    NonNegativeInt,
    OptionalLocalPath,
    OptionalPath,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    SmallInt,
    Tokens,
)

_HOST = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\]")
_PORT = re.compile("[0-9]{1,5}")
_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9_.:/@-]{0,499}")
# Other processes of a run, whose logs and accounts share a folder with an explorer's.
_OF_THE_RUN = re.compile(r"buffer|environment(-[0-9]+)?|main|nats|sync|trainer")


def _variable(name: str) -> str:
    if not name or "=" in name or "\0" in name:
        raise ValueError("must be the name of a variable, without = and NUL")
    return name


def _provider(address: str) -> str:
    host, _, port = address.rpartition(":")
    fits = _HOST.fullmatch(host) and _PORT.fullmatch(port) and 0 < int(port) <= 65535
    if address != "attached" and not fits:
        raise ValueError("must be host:port, or attached")
    return address


def _host(address: str) -> str:
    if not _HOST.fullmatch(f"[{address}]" if ":" in address else address):
        raise ValueError("must be the name or the IP address of a machine")
    return address


def _not_of_the_run(name: str) -> str:
    if _OF_THE_RUN.fullmatch(name):
        raise ValueError("must be another name: a process of the run is called so")
    return name


Variable = Annotated[str, AfterValidator(_variable)]


class RolloutModelConfig(Section):
    """The vLLM engines of one explorer."""

    engine_num: SmallInt = Field(1, description="Engines")
    tensor_parallel_size: SmallInt = Field(1, description="GPUs of each engine")
    enforce_eager: bool = Field(False, description="No CUDA graphs and no compilation: starts faster, runs slower")
    enable_prefix_caching: bool = Field(True, description="Share key-value blocks of equal prefixes")
    enable_chunked_prefill: bool = Field(True, description="Mix prompt and decode work in one engine step")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Part of each GPU's memory an engine may take")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Engine dtype; auto: bfloat16 on GPUs, float32 on CPUs"
    )
    max_num_seqs: PositiveInt | None = Field(
        None, description="Sequences decoded together; null: vllm.LLM's own choice"
    )
    cpu_kvcache_gib: PositiveFloat = Field(1.0, description="Key-value cache of an engine on a CPU, in GiB")
    seed: Seed = Field(42, description="Seed of an engine's sampler")
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of vLLM's own (fields of AsyncEngineArgs); what would break weight versions or "
        "log-probabilities is refused",
    )

    @property
    def quantized(self) -> bool:
        """Whether engines keep their weights or their cache in other numbers than the checkpoint's."""
        cache = self.engine_args.get("kv_cache_dtype", "auto")
        return bool(self.engine_args.get("quantization")) or cache not in ("auto", "bfloat16", "float16")


class PolicyEngineConfig(RolloutModelConfig):
    """The policy's engines, which agents call as they call OpenAI."""

    tool_call_parser: str = Field("hermes", min_length=1, description="vLLM's parser of the calls in agents' replies")
    reasoning_parser: str = Field("", description="vLLM's parser of the thoughts in agents' replies; empty: none")


class ExternalModelConfig(Section):
    """Address of a model that another program serves by OpenAI's API; model_path is its name there."""

    base_url: str = Field(description="http(s) address, mostly ending in /v1")
    api_key_env: str = Field("", description="Environment variable of the explorer that holds the key; empty: no key")
    timeout_seconds: PositiveFloat = Field(120, description="Longest wait for an answer, in seconds")


class AuxiliaryModelConfig(RolloutModelConfig):
    """A further model: a judge, or a reward model. Its weights stay, unless it follows a run."""

    name: str = Field("", description="Name workflows ask for; empty: the last part of model_path")
    model_path: AnyPath = Field(description="Folder or hub name")
    kind: Literal["auto", "generate", "score"] = Field(
        "auto", description="generate: a judge that writes; score: one number per text; auto: by its config.json"
    )
    max_model_len: Tokens | None = Field(None, description="In tokens; null: the policy's")
    trust_remote_code: bool = Field(False, description="Let transformers and vLLM run the model folder's own code")
    enable_thinking: bool | None = Field(None, description="As model.enable_thinking, for this model")
    follows: OptionalLocalPath = Field(
        "", description="Job folder of a run, whose newest checkpoint the engines load; empty: the weights stay"
    )
    external_model: ExternalModelConfig | None = Field(None, description="The model is served elsewhere: no engine")

    @property
    def gpus(self) -> int:
        """GPUs of all its engines."""
        return 0 if self.external_model else self.engine_num * self.tensor_parallel_size


class EnvironmentConfig(Section):
    """An environment or scoring function of an external provider. Several providers of one name share its load."""

    name: str = Field(min_length=1, description="Environment or scoring function, as tasks name it")
    address: Annotated[str, AfterValidator(_provider)] = Field(
        description="gRPC address of its provider, host:port; attached: it attaches itself to the environment service",
    )
    image: str = Field(
        "", description="trinity run starts a container of it by docker, published at address, with the same port"
    )

    @model_validator(mode="after")
    def _place_of_image(self) -> "EnvironmentConfig":
        if self.image and not _IMAGE.fullmatch(self.image):
            raise ValueError(f"image: is {self.image[:200]!r}, must be the name of an image")
        try:
            if self.image:
                ipaddress.ip_address(self.address.rpartition(":")[0].strip("[]"))
        except ValueError:
            what = "must be an IP address of this machine and a port, because it has an image"
            raise ValueError(f"address: is {self.address!r}, {what}") from None
        return self


class DynamicTimeoutConfig(Section):
    """Attempts that take much longer than others end before max_timeout. See docs/workflows.md for the bias."""

    enable: bool = Field(False, description="End such attempts")
    ratio: float = Field(3.0, gt=1, le=1e6, description="Longest attempt, in means of the attempts at its taskset")
    warmup_min_steps: int = Field(
        1, ge=0, le=1_000_000, description="Before: this many steps of tasks of the taskset, by each explorer"
    )


class OverRolloutConfig(Section):
    """A step need not wait for its slowest tasks. See docs/experience.md for the bias."""

    ratio: float = Field(
        0.0, ge=0, lt=1, description="Part of a step's tasks that it may go without, rounded down to tasks; 0: none"
    )
    wait_after_min: float = Field(
        30.0, ge=0, le=1e6, description="Seconds that a step waits for the others once the least are there"
    )


class GuardConfig(Section):
    """A sequential test of each version's rewards against those of the versions before it. See docs/agents.md."""

    alpha: float = Field(0.01, gt=0, lt=0.5, description="Probability that a version is withdrawn by chance")
    margin: float = Field(
        0.05, ge=0, lt=1, description="A version may be worse by this part of the range of rewards, at any time"
    )
    reward_low: float = Field(0.0, allow_inf_nan=False, description="Rewards below it count as this number")
    reward_high: float = Field(1.0, allow_inf_nan=False, description="Rewards above it count as this number")

    @model_validator(mode="after")
    def _range(self) -> "GuardConfig":
        if self.reward_low >= self.reward_high:
            raise ValueError(f"reward_high: is {self.reward_high:g}, must be above reward_low = {self.reward_low:g}")
        return self


class TrialConfig(Section):
    """A new version answers a part of the calls until it is tried; the version before it answers the others."""

    share: float = Field(0.2, gt=0, lt=1, description="Part of the calls that a new version answers")
    calls: PositiveInt = Field(100, description="Calls after which it answers all, at each explorer")
    seconds: PositiveFloat = Field(3600, description="Longest trial; newer versions wait for its end")


class TrafficConfig(Section):
    """Plain calls at the endpoint, recorded until a client sends a reward. See docs/agents.md."""

    keep_days: float = Field(7.0, gt=0, le=3650, description="Longest wait of a recorded call for its reward, in days")
    keep_mib: PositiveInt = Field(1024, description="Recorded calls and rewards on NATS, in MiB; the oldest go")
    guard: GuardConfig | None = Field(None, description="Withdraw versions that clients reward less; null: never")
    trial: TrialConfig | None = Field(
        None, description="Try a new version on a part of the calls; needs lora_configs[].merged: false. null: no trial"
    )


class OlderVersionsConfig(Section):
    """Versions that play seats named `older` (players_workflow). See docs/workflows.md."""

    every: PositiveInt = Field(10, description="They are those of every n-th optimizer step, and the base model")
    keep: int = Field(4, ge=1, le=16, description="The newest that many of them play, each as often as the others")

    def before(self, step: int) -> list[int]:
        """Returns the steps of the versions that play against the version of `step`, oldest first; 0 is the base."""
        newest = max(0, (step - 1) // self.every)
        return [number * self.every for number in range(max(0, newest - self.keep + 1), newest + 1)]


class ExplorerConfig(Section):
    """Rollout engines and what runs on them."""

    name: Annotated[FolderName, AfterValidator(_not_of_the_run)] = Field(
        "explorer", description="Must differ between explorers of one run"
    )
    runner_per_model: SmallInt = Field(8, description="Tasks worked on at the same time, per engine")
    max_timeout: PositiveFloat = Field(1800, description="Longest attempt at a task, in seconds")
    dynamic_timeout: DynamicTimeoutConfig = Field(default_factory=DynamicTimeoutConfig)
    over_rollout: OverRolloutConfig = Field(default_factory=OverRolloutConfig)
    max_retry_times: NonNegativeInt = Field(
        2, description="Attempts after the first before a task becomes a dead letter"
    )
    durable_episodes: bool = Field(
        True,
        description="Keep the turns of unfinished episodes, so that another explorer continues them; where the "
        "environment is deterministic and more than one turn is played",
    )
    flush_tokens: NonNegativeInt = Field(
        4096,
        description="With durable_episodes: tokens after which a growing reply is kept, for other explorers to continue"
        "; 0: only whole replies. Replies with stop texts are kept whole",
    )
    max_dead_letters_in_a_row: NonNegativeInt = Field(
        32,
        description="The run ends after this many failed tasks of one cause without a stored group between; 0: never",
    )
    reward_bound: PositiveFloat = Field(
        1e6,
        description="Rewards are within plus and minus this number. A provider's answer beyond it breaks the contract, "
        "a workflow's own reward makes its task a dead letter",
    )
    logprob_bound: PositiveFloat = Field(
        1e4, description="A log-probability of a sampled token below minus this number makes its task a dead letter"
    )
    eval_interval: PositiveInt = Field(100, description="Optimizer steps between evaluations")
    eval_on_startup: bool = Field(True, description="Evaluate the base model first")
    bench_on_latest_checkpoint: bool = Field(False, description="Mode bench: only the newest checkpoint")
    env_vars: dict[Variable, EnvironmentText] = Field(
        default_factory=dict, description="Environment variables of the explorer"
    )
    record: bool = Field(
        False, description="Agents outside open sessions at the endpoint, whose samples are the run's experience"
    )
    traffic: TrafficConfig | None = Field(
        None, description="With record: learn from plain calls at the endpoint too, once clients reward them"
    )
    listen_address: Annotated[str, AfterValidator(_host)] = Field(
        "127.0.0.1", description="Mode serve, or record: address of the OpenAI-compatible endpoint"
    )
    proxy_port: int = Field(8010, ge=0, le=65535, description="Mode serve, or record: its port; 0: any free one")
    api_keys_file: AnyPath | Literal[""] = Field(
        "", description="Mode serve, or record: file of the keys that clients must send, one a line; empty: one is made"
    )
    request_completions: PositiveInt = Field(
        256, description="OpenAI-compatible endpoint and gateway: most completions of a request, and open of one key"
    )
    request_timeout: PositiveFloat = Field(
        1800, description="OpenAI-compatible endpoint and gateway: longest answer to one request, in seconds"
    )
    agent_wait: PositiveFloat = Field(
        600,
        description="external_agent_workflow: longest wait for a program that opens a session of a task, in seconds; "
        "then the attempt fails",
    )
    older_versions: OlderVersionsConfig = Field(default_factory=OlderVersionsConfig)
    rollout_model: PolicyEngineConfig = Field(default_factory=PolicyEngineConfig)
    auxiliary_models: list[AuxiliaryModelConfig] = Field(default_factory=list, description="Judges and reward models")
    environments: list[EnvironmentConfig] = Field(
        default_factory=list, description="Provided elsewhere; other names: the run's own environment service"
    )
    environment_wait: PositiveFloat = Field(
        60, description="Longest wait for a name that no provider has served, in seconds"
    )


SyncStyle = Literal["fixed", "explorer_driven", "trainer_driven", "fully_async"]


class SynchronizerConfig(Section):
    """Time and transport of weights, and the lead of explorers over the trainer. See docs/staleness.md."""

    sync_method: Literal["nccl", "checkpoint", "memory"] = Field(
        "nccl",
        description="nccl: collectively where explorers can (gloo on CPUs), else by storage; checkpoint: only "
        "storage; memory: storage in this machine's memory",
    )
    sync_style: SyncStyle = Field(
        "fixed",
        description="fixed: sync_offset batches ahead; explorer_driven, trainer_driven: one sync_interval more; "
        "fully_async: as far as the experience buffer's capacity",
    )
    sync_interval: PositiveInt = Field(1, description="Optimizer steps between weight versions")
    sync_offset: NonNegativeInt = Field(0, description="Batches explorers may be ahead")
    sync_timeout: PositiveFloat = Field(3600, description="Longest wait for the other side, in seconds")
    storage: list[OptionalPath] = Field(
        default_factory=lambda: ["folder"],
        description="Where versions are put: folder (in the job folder), a path, s3://bucket/prefix, jetstream "
        "(small models)",
    )
    full_interval: PositiveInt = Field(
        10,
        description="On s3 and jetstream every n-th version is whole, the others are differences",
    )
    versions_to_keep: PositiveInt = Field(
        3, description="Versions whose files stay, for explorers that lag and rollback"
    )
    bucket_mib: PositiveInt = Field(512, description="Weights sent or gathered together, in MiB")
    collective_timeout: PositiveFloat = Field(
        30, description="Deadline of each step of a collective update, in seconds"
    )
    canary: bool = Field(True, description="An explorer must reproduce the trainer's log-probabilities first")
    canary_tolerance: PositiveFloat | None = Field(
        None,
        description="Largest mean difference, in nats; thirty times it for a single token; null: by dtypes and "
        "rounding",
    )
    on_rejected: Literal["stop", "continue"] = Field("stop", description="The trainer's reaction to a rejected version")
