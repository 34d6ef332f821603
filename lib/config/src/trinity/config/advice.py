"""What a user should know of a configuration that is right: keys that do less than they say, and memory."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from trinity.config.algorithms import ALGORITHMS
from trinity.config.plan import DEFAULT_TOKENS, Plan
from trinity.config.schema import Config
from trinity.config.stages import expand

_GIB = 2**30
_SIZE_IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([bBmM])(?![a-zA-Z0-9])")


def advice(config: Config) -> Iterator[str]:
    """Sentences of the form `key: what about it`, each once."""
    seen: set[str] = set()
    for stage in expand(config):
        for sentence in _advice(stage):
            if sentence not in seen:
                seen.add(sentence)
                yield sentence


def _advice(config: Config) -> Iterator[str]:
    model, source = config.model, config.buffer.trainer_input.experience_buffer
    algorithm = ALGORITHMS.get(config.algorithm.algorithm_type)
    if algorithm is None:
        return
    if algorithm.critic:
        yield f"algorithm.algorithm_type: {config.algorithm.algorithm_type} needs a critic; this version checks it only"
    if "algorithm_type" not in config.algorithm.model_fields_set:
        yield "algorithm.algorithm_type: is not given; grpo is taken (Trinity-RFT takes ppo)"
    if config.algorithm.algorithm_type == "grpo" and config.algorithm.repeat_times == 1 and config.mode != "explore":
        yield "algorithm.repeat_times: is 1; the advantage in a group of one is its reward, without a baseline"
    if config.cluster.node_num > 1:
        yield "cluster.node_num: `trinity run` starts processes on this machine; docs/modes.md says how others join"
    lengths = (model.max_model_len, model.max_prompt_tokens, model.max_response_tokens)
    if lengths == (None, None, None) and config.mode != "explore":
        yield f"model.max_model_len: no length is given; taken are {DEFAULT_TOKENS} prompt and as many response tokens"
    if not algorithm.offline:
        if source is not None and source.path:
            yield "buffer.trainer_input.experience_buffer.path: has no effect: experience is in the log on NATS"
        if config.synchronizer.sync_method != "checkpoint" and "sync_method" in config.synchronizer.model_fields_set:
            yield f"synchronizer.sync_method: {config.synchronizer.sync_method} weights travel as files for now"
    explorer = config.explorer
    if (
        not algorithm.offline
        and not config.buffer.explorer_input.eval_tasksets
        and "eval_interval" in explorer.model_fields_set
    ):
        yield "explorer.eval_interval: has no effect: there are no eval_tasksets"
    if config.mode == "explore" and config.buffer.explorer_input != type(config.buffer.explorer_input)():
        yield "buffer.explorer_input: has no effect in mode explore: tasks are those of the run that is joined"


def parameters_of(model_path: str) -> tuple[float, str] | None:
    """Parameters of a model and where the number is from: its folder, or its name (`Qwen2.5-1.5B`). None: unknown."""
    folder = Path(model_path).expanduser()
    files = list(folder.glob("*.safetensors")) if folder.is_dir() else []
    if files:
        width = 4 if _dtype(folder) == "float32" else 2
        return sum(file.stat().st_size for file in files) / width, "by its files"
    found = _SIZE_IN_NAME.findall(model_path.rpartition("/")[2])
    if not found:
        return None
    number, unit = found[-1]
    return float(number) * (1e9 if unit in "bB" else 1e6), "by its name"


def _dtype(folder: Path) -> str:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return ""
    return str(config.get("dtype") or config.get("torch_dtype") or "")


def memory(plan: Plan) -> str | None:
    """Memory of the weights and training states, in words; None where the size of the model is not known.

    Adam with float32 master weights: 2 bytes of bfloat16 weights, 4 of gradients, 12 of states a parameter; ZeRO shares
    out states (1), gradients too (2), weights too (3).
    """
    known = parameters_of(plan.config.model.model_path)
    if known is None:
        return None
    count, source = known
    gpus, stage = plan.gpus, plan.config.trainer.deepspeed.zero_stage
    ranks = gpus.trainer or plan.config.trainer.num_ranks or 1
    weights, gradients, states = 2.0, 4.0, 12.0
    states /= ranks if stage >= 1 else 1
    gradients /= ranks if stage >= 2 else 1
    weights /= ranks if stage >= 3 else 1
    reference = 2.0 if plan.algorithm.needs_reference else 0.0
    trainer = count * (weights + gradients + states + reference) / _GIB
    engine = count * 2.0 / plan.config.explorer.rollout_model.tensor_parallel_size / _GIB
    rollout = "" if plan.offline else f"; weights of an engine {engine:.1f} GiB a GPU, key-value cache beside"
    return (
        f"{count / 1e9:.2f} billion parameters {source}: training states {trainer:.1f} GiB a rank, activations of "
        f"{plan.micro_batch_tokens} tokens beside{rollout}"
    )
