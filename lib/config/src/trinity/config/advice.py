"""Advice on a valid configuration: keys with less effect than their name suggests, and memory."""

from collections.abc import Iterator

from trinity.config.algorithm_advice import algorithm_advice
from trinity.config.algorithms import ALGORITHMS
from trinity.config.checks.weights import weights_advice
from trinity.config.memory import Sharding, host_gib, parameters_of, training_gib, weights_gib
from trinity.config.plan import DEFAULT_TOKENS, Plan, learns_from_disk
from trinity.config.schema import Config
from trinity.config.stages import expand


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
    if "algorithm_type" not in config.algorithm.model_fields_set:
        yield "algorithm.algorithm_type: is not given; grpo is taken (Trinity-RFT takes ppo)"
    if config.algorithm.algorithm_type == "grpo" and config.algorithm.repeat_times == 1 and config.mode != "explore":
        yield "algorithm.repeat_times: is 1; the advantage in a group of one is its reward, without a baseline"
    if config.cluster.node_num > 1:
        yield "cluster.node_num: `trinity run` starts processes on this machine; docs/modes.md says how others join"
    lengths = (model.max_model_len, model.max_prompt_tokens, model.max_response_tokens)
    if lengths == (None, None, None) and config.mode != "explore":
        yield f"model.max_model_len: no length is given; taken are {DEFAULT_TOKENS} prompt and as many response tokens"
    if not learns_from_disk(config):
        if source is not None and source.path:
            yield "buffer.trainer_input.experience_buffer.path: has no effect: experience is in the log on NATS"
        yield from weights_advice(config)
    explorer = config.explorer
    if (
        not algorithm.offline
        and not config.buffer.explorer_input.eval_tasksets
        and "eval_interval" in explorer.model_fields_set
    ):
        yield "explorer.eval_interval: has no effect: there are no eval_tasksets"
    if config.mode == "explore" and config.buffer.explorer_input != type(config.buffer.explorer_input)():
        yield "buffer.explorer_input: has no effect in mode explore: tasks are those of the run that is joined"
    yield from algorithm_advice(config)


def memory(plan: Plan) -> str | None:
    """Memory of weights and training states, as text; None where the size of the model is not known."""
    known = parameters_of(plan.config.model.model_path)
    if known is None:
        return None
    count, source = known
    sharding = Sharding.of(plan, plan.gpus.trainer or plan.config.trainer.num_ranks or 1)
    trainer, host = training_gib(plan, count, sharding), host_gib(plan, count, sharding)
    beside = f" and {host:.1f} GiB of host memory" if host else ""
    engine = weights_gib(count, plan.config.explorer.rollout_model)
    least = "" if plan.config.trainer.max_token_len_per_gpu else "at least "
    rollout = "" if plan.offline else f"; weights of an engine {engine:.1f} GiB a GPU, key-value cache beside"
    return (
        f"{count / 1e9:.2f} billion parameters {source}: training states {trainer:.1f} GiB a rank{beside}, "
        f"activations of {least}{plan.micro_batch_tokens} tokens beside{rollout}"
    )
