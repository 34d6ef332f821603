"""Names of the installed vLLM: arguments that engine_args may set or may not, and parsers."""

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from trinity.config.errors import Problem, did_you_mean
from trinity.config.schema import Config
from trinity.config.schema.explorer import PolicyEngineConfig, RolloutModelConfig

# Arguments that have a key of their own in the engine's section, or elsewhere.
_KEYS = {
    **{
        name: name
        for name in (
            "dtype", "enable_chunked_prefill", "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization",
            "max_num_seqs", "seed", "tensor_parallel_size",
        )
    },
    "model": "model.model_path", "max_model_len": "model.max_model_len",
    "trust_remote_code": "model.trust_remote_code",
    **dict.fromkeys(("data_parallel_size", "data_parallel_size_local"), "engine_num"),
}  # fmt: skip
_VERSIONS = "weight versions travel and are counted through it"
_SAMPLING = "the recorded log-probabilities would be of another distribution than the trainer's"
_OTHER_MODEL = "the trainer would compute another model"
_PLACES = "Trinity places engines; GPUs are counted by engine_num and tensor_parallel_size"
_KIND = "follows from the kind of the model"
_REFUSED = {
    **dict.fromkeys(
        (
            "worker_cls", "worker_extension_cls", "weight_transfer_config", "scheduler_cls", "scheduling_policy",
            "stream_interval", "enable_sleep_mode",
        ),
        _VERSIONS,
    ),
    **dict.fromkeys(("logprobs_mode", "generation_config", "override_generation_config", "logits_processors",
                     "watermark_config"), _SAMPLING),
    **dict.fromkeys(
        ("hf_overrides", "load_format", "revision", "tokenizer", "skip_tokenizer_init", "hf_config_path",
         "model_class_overrides", "model_weights"),
        _OTHER_MODEL,
    ),
    **dict.fromkeys(
        ("pipeline_parallel_size", "distributed_executor_backend", "device_ids", "nnodes", "node_rank", "master_addr",
         "master_port", "decode_context_parallel_size", "prefill_context_parallel_size"),
        _PLACES,
    ),
    **dict.fromkeys(("runner", "convert", "pooler_config"), _KIND),
    "reasoning_parser": "explorer.rollout_model.reasoning_parser says it",
    **dict.fromkeys(
        ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank"),
        "follows from model.lora_configs, whose merged: false makes engines hold adapters",
    ),
    "disable_log_stats": "Trinity reports an engine's usage by itself",
    "hf_token": "secrets do not belong into a YAML; set the environment variable HF_TOKEN",
}  # fmt: skip
# Key -> the module whose first dictionary has the parsers' names.
_PARSERS = {"tool_call_parser": "tool_parsers/__init__.py", "reasoning_parser": "reasoning/__init__.py"}
# Where weights stay and no log-probability is trained on.
_FOR_ALL = (_PLACES, _KIND)


def check_engine_args(config: Config) -> Iterator[Problem]:
    explorer = config.explorer
    yield from _parser_problems(explorer.rollout_model)
    yield from _problems("explorer.rollout_model", explorer.rollout_model, policy=True)
    for index, model in enumerate(explorer.auxiliary_models):
        yield from _problems(f"explorer.auxiliary_models.{index}", model, policy=False)


def _parser_problems(section: PolicyEngineConfig) -> Iterator[Problem]:
    """Parsers that no installed vLLM has. The default is not looked up: it is not used where no agent calls tools."""
    for name in sorted(_PARSERS.keys() & section.model_fields_set):
        parser = getattr(section, name)
        known = installed_parsers(name)
        if parser and known and parser not in known:
            what = f"{parser!r} is no parser of the installed vLLM; {did_you_mean(parser, known)}"
            yield Problem(f"explorer.rollout_model.{name}", what)


def _problems(place: str, section: RolloutModelConfig, *, policy: bool) -> Iterator[Problem]:
    known = installed_arguments() if section.engine_args else frozenset()
    for name in section.engine_args:
        where, reason = f"{place}.engine_args.{name}", _REFUSED.get(name, "")
        if name in _KEYS:
            key = _KEYS[name]
            if not policy and key.startswith("model."):
                key = name if name in type(section).model_fields else key.removeprefix("model.")
            yield Problem(where, f"has a key of its own: {key if '.' in key else f'{place}.{key}'}")
        elif reason and (policy or reason in _FOR_ALL or name in ("disable_log_stats", "hf_token")):
            yield Problem(where, f"cannot be set: {reason}")
        elif known and name not in known:
            advice = did_you_mean(name, known, "see vllm.AsyncEngineArgs")
            yield Problem(where, f"is no argument of the installed vLLM; {advice}")


@cache
def installed_arguments() -> frozenset[str]:
    """Names of the installed vLLM's AsyncEngineArgs; empty if there is none."""
    classes = [node for node in _source("engine/arg_utils.py") if isinstance(node, ast.ClassDef)]
    fields = [field for found in classes if found.name in ("EngineArgs", "AsyncEngineArgs") for field in found.body]
    return frozenset(
        field.target.id for field in fields if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


@cache
def installed_parsers(key: str) -> frozenset[str]:
    """Names that the installed vLLM has for tool_call_parser or reasoning_parser; empty if there is none."""
    for node in _source(_PARSERS[key]):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return frozenset(ast.literal_eval(name) for name in node.value.keys if name is not None)
    return frozenset()


def _source(name: str) -> list[ast.stmt]:
    """A module of the installed vLLM, read without importing it, which would take many seconds; empty without vLLM."""
    spec = importlib.util.find_spec("vllm")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    path = next((path for folder in folders if (path := folder / name).is_file()), None)
    return ast.parse(path.read_bytes()).body if path else []
