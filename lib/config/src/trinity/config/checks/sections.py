"""Contradictions between keys, found before anything starts."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from trinity.config.algorithms import PARTS, part_problems, problems_of_arguments, resolvable, resolve
from trinity.config.checks.auxiliary import check_auxiliary
from trinity.config.checks.engine_args import check_engine_args
from trinity.config.checks.lora import check_lora, check_stages
from trinity.config.checks.over_rollout import check_over_rollout
from trinity.config.checks.players import check_players
from trinity.config.checks.reproducible import check_reproducible
from trinity.config.checks.router_replay import check_router_replay
from trinity.config.checks.teacher import TEACHER_WORKFLOWS, check_teacher
from trinity.config.checks.traffic import check_traffic
from trinity.config.checks.vision import check_images
from trinity.config.checks.weights import check_checkpoint_storage, check_synchronizer
from trinity.config.errors import OF_PLUGINS, Problem, did_you_mean
from trinity.config.memory import parameters_of
from trinity.config.names import (
    ARCHIVES,
    MONITOR_ARGS,
    PRIORITY_ARGS,
    auxiliary_name,
    is_archive,
    reward_functions,
    workflows,
)
from trinity.config.operators import experience_operator_problems
from trinity.config.plan import expand, learns_from_disk, learns_from_pairs
from trinity.config.schema import Config
from trinity.config.schema.buffer import SelectorConfig, TasksetConfig
from trinity.config.schema.trainer import TrainerConfig
from trinity.config.workflows import OF_TRINITY_RFT, asked_model, workflow_problems
from trinity.plugins import satellites
from trinity.plugins.arguments import Argument
from trinity.plugins.declarations import ALGORITHMS, SAMPLE_STRATEGIES, SELECTORS

# A check of one stage, by a library that this one does not import.
Check = Callable[[Config], Iterable[Problem]]
_ROPE_NEEDS = {
    "default": (), "linear": ("factor",), "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}  # fmt: skip
_ROPE_TAKES = {**_ROPE_NEEDS, "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")}


def check(config: Config, plugins_loaded: bool = True, others: Iterable[Check] = ()) -> Iterator[Problem]:
    """Yields every contradiction in the configuration and in each of its stages, with the findings of `others`.

    Names that plugins may register are looked up only if the plugins are loaded.
    """
    names = [stage.stage_name for stage in config.stages]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(f"stages.{index}.stage_name", f"is {name!r}, which another stage has already")
    yield from check_stages(config)
    seen: set[Problem] = set()
    for index, stage in enumerate(expand(config)):
        for problem in _check_stage(stage, plugins_loaded, others):
            section = problem.path.split(".")[0]
            own = config.stages and (section == "mode" or getattr(config.stages[index], section, None) is not None)
            placed = Problem(f"stages.{index}.{problem.path}" if own else problem.path, problem.message)
            if placed not in seen:
                seen.add(placed)
                yield placed


def _check_stage(config: Config, plugins_loaded: bool, others: Iterable[Check]) -> Iterator[Problem]:
    if plugins_loaded or resolvable(config.algorithm):
        yield from check_algorithm(config)
    yield from _check_monitor(config)
    yield from check_trainer(config.trainer)
    yield from _check_optimizers(config)
    yield from check_lora(config)
    yield from check_rope(config)
    yield from check_engine_args(config)
    for other in others:
        yield from other(config)
    declared = ALGORITHMS.get(config.algorithm.algorithm_type)
    if declared is None:
        return
    yield from _check_lengths(config)
    if resolvable(config.algorithm):
        yield from _check_sampling(config)
    if declared.offline or learns_from_pairs(config):
        yield from _check_offline(config, plugins_loaded)
    elif learns_from_disk(config):
        yield from _check_archive(config, plugins_loaded)
    else:
        yield from _check_online(config, plugins_loaded)


def check_algorithm(config: Config) -> Iterator[Problem]:
    """Finds unknown names and arguments, values that arguments do not take, and parts that do not go together."""
    algorithm = config.algorithm
    if algorithm.algorithm_type not in ALGORITHMS:
        yield Problem("algorithm.algorithm_type", _unknown(algorithm.algorithm_type, ALGORITHMS))
        return
    for key, registry, attribute in PARTS:
        name = getattr(algorithm, key) or getattr(ALGORITHMS[algorithm.algorithm_type], attribute)
        if name is not None and name not in registry:
            yield Problem(f"algorithm.{key}", _unknown(name, registry))
            continue
        known = registry[name].args if name is not None else {}
        for argument, problem in problems_of_arguments(name, known, getattr(algorithm, f"{key}_args") or {}):
            yield Problem(f"algorithm.{key}_args.{argument}", problem)
    if resolvable(algorithm):
        for place, problem in part_problems(algorithm):
            if place == "repeat_times" and learns_from_pairs(config):
                continue  # the two of a row are compared
            yield Problem(f"algorithm.{place}", problem)


def _check_optimizers(config: Config) -> Iterator[Problem]:
    """Finds optimizers whose states cannot be in host memory."""
    policy, critic = config.algorithm.optimizer, config.trainer.critic.optimizer
    for key, optimizer in {"algorithm.optimizer": policy, "trainer.critic.optimizer": critic}.items():
        if config.trainer.deepspeed.offload_optimizer and optimizer.optimizer_type != "adamw":
            problem = f"is {optimizer.optimizer_type}, whose states stay on the GPU; use adamw"
            yield Problem(f"{key}.optimizer_type", f"{problem}, or trainer.deepspeed.offload_optimizer: false")


def check_trainer(trainer: TrainerConfig) -> Iterator[Problem]:
    """Finds contradictions between sharding, offload, packing, recomputing and sequence parallelism."""
    sharding, base = trainer.deepspeed, "trainer.deepspeed"
    if sharding.offload_optimizer and sharding.zero_stage == 0:
        yield Problem(f"{base}.offload_optimizer", f"needs {base}.zero_stage 1, 2 or 3, which is 0")
    if sharding.offload_param and sharding.zero_stage != 3:
        yield Problem(f"{base}.offload_param", f"needs {base}.zero_stage 3, which is {sharding.zero_stage}")
    if sharding.offload_param and not sharding.offload_optimizer:
        yield Problem(f"{base}.offload_param", f"needs {base}.offload_optimizer: true")
    size, key = trainer.ulysses_sequence_parallel_size, "trainer.ulysses_sequence_parallel_size"
    if size > 1 and not trainer.use_remove_padding:
        yield Problem(key, f"is {size}; ranks can only share packed sequences: trainer.use_remove_padding: true")
    for other in ("use_remove_padding", "use_dynamic_bsz"):
        if trainer.shared_prompts and not getattr(trainer, other):
            yield Problem("trainer.shared_prompts", f"needs trainer.{other}: true")
    if trainer.gradient_checkpointing is False and trainer.gradient_checkpointing_layers:
        problem = f"is {trainer.gradient_checkpointing_layers}, but trainer.gradient_checkpointing is false"
        yield Problem("trainer.gradient_checkpointing_layers", problem)
    if trainer.num_ranks and trainer.num_ranks % size:
        yield Problem(key, f"is {size}, which does not divide trainer.num_ranks, {trainer.num_ranks}")


def _check_lengths(config: Config) -> Iterator[Problem]:
    model = config.model
    joins = config.mode == "explore"  # the run that it joins gives the missing keys
    if not model.model_path and not joins:
        yield Problem("model.model_path", "is empty; give the folder or hub name of a model")
    total, prompt, response = model.max_model_len, model.max_prompt_tokens, model.max_response_tokens
    if total is None and (prompt is None) != (response is None):
        if not joins:
            missing = "max_prompt_tokens" if prompt is None else "max_response_tokens"
            yield Problem("model.max_model_len", f"cannot be derived; give it, or {missing}")
    elif total is not None and prompt is not None and response is not None and prompt + response > total:
        yield Problem(
            "model.max_model_len",
            f"is {total}, less than max_prompt_tokens + max_response_tokens = {prompt} + {response}",
        )
    elif total is not None and max(prompt or 0, response or 0) >= total:
        yield Problem("model.max_model_len", f"is {total}, which leaves no token for the other part")
    longest = response if response is not None else (total - prompt if prompt else total // 2) if total else None
    if longest is not None and model.min_response_tokens > longest > 0:
        problem = f"is {model.min_response_tokens}, more than max_response_tokens = {longest}"
        yield Problem("model.min_response_tokens", problem)


def _check_sampling(config: Config) -> Iterator[Problem]:
    """Checks what turns groups into batches: sample strategy, auxiliary buffers, replay, the archive of the log."""
    algorithm, inputs = config.algorithm, config.buffer.trainer_input
    plan = resolve(algorithm)
    args = plan.sample_strategy.args
    if plan.sample_strategy.name == "mix":
        yield from _check_mix(config, args)
    saved = config.data_processor.experience_pipeline.input_save_path
    if saved is not None and not is_archive(saved):
        yield Problem("data_processor.experience_pipeline.input_save_path", f"is {saved!r}, must be: {ARCHIVES}")
    source = inputs.experience_buffer
    if source is None:
        return
    replay, base = source.replay_buffer, "buffer.trainer_input.experience_buffer"
    name = replay.priority_fn
    for argument, problem in problems_of_arguments(name, PRIORITY_ARGS[name], replay.priority_fn_args):
        yield Problem(f"{base}.replay_buffer.priority_fn_args.{argument}", problem)
    strategy = SAMPLE_STRATEGIES[plan.sample_strategy.name]
    if replay.enable and (strategy.alias_of or strategy.name) not in ("default", "mix"):
        yield Problem(f"{base}.replay_buffer.enable", f"is true with sample_strategy {strategy.name}; use one of them")
    if not learns_from_disk(config) and source.path is not None and not is_archive(source.path):
        yield Problem(f"{base}.path", f"is {source.path!r}, must be an archive: {ARCHIVES}")


def _check_mix(config: Config, args: dict[str, Any]) -> Iterator[Problem]:
    buffers, ratio = config.buffer.trainer_input.auxiliary_buffers, args["expert_data_ratio"]
    place = "algorithm.sample_strategy_args"
    if SAMPLE_STRATEGIES["mix"].args["expert_data_ratio"].problem(ratio):
        return  # check_algorithm says it
    name = args["sft_dataset_name"]
    if name not in buffers:
        yield Problem(f"{place}.sft_dataset_name", f"is {name!r}; buffer.trainer_input.auxiliary_buffers has "
                      f"{', '.join(buffers) or 'none'}")  # fmt: skip
    elif not buffers[name].path:
        yield Problem(f"buffer.trainer_input.auxiliary_buffers.{name}.path", "is missing; expert rows come from it")
    size, repeat = config.buffer.train_batch_size, config.algorithm.repeat_times
    experts = math.ceil(size * ratio)
    if size and ((size - experts) % repeat or size <= experts):
        yield Problem(
            "buffer.train_batch_size",
            f"is {size}, of which {experts} are expert rows; the other {size - experts} must be a multiple of "
            f"algorithm.repeat_times = {repeat}",
        )


def _check_offline(config: Config, plugins_loaded: bool) -> Iterator[Problem]:
    kind = config.algorithm.algorithm_type
    if config.mode not in ("train", "train_node"):
        yield Problem("mode", f"is {config.mode!r}; {kind} learns from a dataset and needs mode: train")
    source = config.buffer.trainer_input.experience_buffer
    if source is None or not source.path:
        yield Problem("buffer.trainer_input.experience_buffer.path", f"is missing; {kind} reads its dataset from it")
    yield from check_images(config, [])
    if learns_from_pairs(config):
        yield from _check_batch_size(config)
    if not config.buffer.train_batch_size and not learns_from_pairs(config):
        yield Problem("buffer.train_batch_size", f"is 0; {kind} needs the number of rows per optimizer step")
    if source is not None:
        place = "buffer.trainer_input.experience_buffer.data_selector"
        yield from _check_selector(place, source.data_selector, plugins_loaded)
        name = source.data_selector.selector_type
        if name in SELECTORS and "rewards" in SELECTORS[name].traits:
            yield Problem(f"{place}.selector_type", f"is {name!r}, which learns from rewards; {kind} has none")
    if config.mode == "train":
        yield from _check_gpus(config)


def _check_archive(config: Config, plugins_loaded: bool) -> Iterator[Problem]:
    """Checks reinforcement learning from an archive of experience."""
    source, place = config.buffer.trainer_input.experience_buffer, "buffer.trainer_input.experience_buffer"
    assert source is not None
    if not source.path or not is_archive(source.path):
        yield Problem(f"{place}.path", f"is {source.path!r}; without explorers it must be an archive: {ARCHIVES}")
    if not config.buffer.total_steps and not config.trainer.total_steps:
        yield Problem("buffer.total_steps", "is missing; how long an archive is shows when the run has begun")
    if source.replay_buffer.enable:
        yield Problem(f"{place}.replay_buffer.enable", "is true; an archive is read in the order of data_selector")
    yield from _check_batch_size(config)
    yield from _check_selector(f"{place}.data_selector", source.data_selector, plugins_loaded)
    yield from _check_gpus(config)


def _check_batch_size(config: Config) -> Iterator[Problem]:
    size, repeat = config.buffer.train_batch_size, config.algorithm.repeat_times
    mixes = resolvable(config.algorithm) and resolve(config.algorithm).sample_strategy.name == "mix"
    if size % repeat and not mixes:  # _check_mix counts without the expert rows
        problem = f"is {size}, must be a multiple of algorithm.repeat_times = {repeat}"
        yield Problem("buffer.train_batch_size", problem)


def _check_online(config: Config, plugins_loaded: bool) -> Iterator[Problem]:
    buffer = config.buffer
    yield from _check_batch_size(config)
    source = buffer.explorer_input
    if source.taskset is not None and source.tasksets:
        yield Problem("buffer.explorer_input.tasksets", "is given together with taskset; use one of them")
    has_tasks = source.taskset is not None or source.tasksets or config.explorer.traffic is not None
    if not has_tasks and config.mode in ("both", "train"):
        yield Problem("buffer.explorer_input.taskset", f"is missing; {config.algorithm.algorithm_type} needs tasks")
    if config.mode == "bench" and not source.eval_tasksets:
        yield Problem("buffer.explorer_input.eval_tasksets", "is missing; mode bench evaluates on them")
    yield from _check_tasksets(config, plugins_loaded)
    yield from check_images(config, source.by_key())
    if plugins_loaded:
        yield from _check_names(config)
        operators = config.data_processor.experience_pipeline.operators
        yield from experience_operator_problems(operators)
    yield from _check_gpus(config)
    yield from check_auxiliary(config)
    yield from check_router_replay(config)
    if resolvable(config.algorithm):
        yield from check_reproducible(config)
        yield from check_over_rollout(config)
        yield from check_traffic(config)
        yield from check_players(config)
    if plugins_loaded and config.mode in ("both", "train"):
        yield from check_teacher(config)
    if config.mode in ("both", "train"):
        known = parameters_of(config.model.model_path) if config.model.model_path else None
        yield from check_synchronizer(config, known[0] if known else None)
        yield from check_checkpoint_storage(config)


def _check_tasksets(config: Config, plugins_loaded: bool) -> Iterator[Problem]:
    names: dict[tuple[bool, str], str] = {}
    for key, taskset in config.buffer.explorer_input.by_key():
        place = f"buffer.explorer_input.{key}"
        kind = (key.startswith("eval"), taskset.name)
        if taskset.name and names.setdefault(kind, place) != place:
            yield Problem(f"{place}.name", f"is {taskset.name!r}, which {names[kind]} has already")
        yield from _check_selector(f"{place}.data_selector", taskset.data_selector, plugins_loaded)


def _check_names(config: Config) -> Iterator[Problem]:
    """Checks workflows and reward functions of the whole input and of each taskset."""
    source, base = config.buffer.explorer_input, "buffer.explorer_input"
    places: list[tuple[str, str, str | None]] = [
        (base, "default_workflow_type", source.default_workflow_type),
        (base, "default_eval_workflow_type", source.default_eval_workflow_type),
        (base, "default_reward_fn_type", source.default_reward_fn_type),
    ]
    for key, taskset in source.by_key():
        places.append((f"{base}.{key}", "default_workflow_type", taskset.default_workflow_type))
        places.append((f"{base}.{key}", "default_reward_fn_type", taskset.default_reward_fn_type))
    scorers = (*reward_functions(), *(provided.name for provided in config.explorer.environments))
    for place, field, name in places:
        known = scorers if field == "default_reward_fn_type" else workflows()
        if name is not None and name not in known:
            yield Problem(f"{place}.{field}", _unknown(name, known))
    for key, taskset in source.by_key():
        workflow = source.workflow_of(taskset, key.startswith("eval"))
        for argument, problem in workflow_problems(workflow, taskset.workflow_args):
            yield Problem(f"{base}.{key}.workflow_args.{argument}", problem)
        yield from _check_asked(config, workflow, taskset)


def _check_asked(config: Config, workflow: str, taskset: TasksetConfig) -> Iterator[Problem]:
    """Checks the auxiliary model that a workflow calls. Mode train calls none; check_teacher checks teachers."""
    known = [auxiliary_name(model) for model in config.explorer.auxiliary_models]
    asked = asked_model(workflow, taskset.workflow_args)
    if config.mode == "train" or asked is None or workflow in TEACHER_WORKFLOWS:
        return
    outside = [auxiliary_name(model) for model in config.explorer.auxiliary_models if model.external_model]
    if workflow == "rubric_judge_openai_workflow" and (asked or (known[0] if known else "")) not in outside:
        what = "whose judge has external_model: give it base_url and name, or use rubric_judge_workflow"
        yield Problem("explorer.auxiliary_models", f"are asked by rubric_judge_openai_workflow, {what}")
    elif asked not in known and (asked or not known):
        what = f"has no {asked!r}, which {workflow} asks" if asked else f"is empty, and {workflow} asks one"
        yield Problem(
            "explorer.auxiliary_models", f"{what}; {did_you_mean(asked, known) if known else 'add the model'}"
        )


def _check_selector(place: str, selector: SelectorConfig, plugins_loaded: bool = True) -> Iterator[Problem]:
    if selector.selector_type not in SELECTORS:
        if plugins_loaded:
            yield Problem(f"{place}.selector_type", _unknown(selector.selector_type, SELECTORS))
        return
    name = selector.selector_type
    for argument, problem in problems_of_arguments(name, SELECTORS[name].args, selector.kwargs):
        yield Problem(f"{place}.kwargs.{argument}", problem)
    if selector.selector_type == "offline_easy2hard" and not selector.feature_keys:
        yield Problem(f"{place}.feature_keys", "is empty; offline_easy2hard orders rows by the columns named here")


def _check_monitor(config: Config) -> Iterator[Problem]:
    kind = config.monitor.monitor_type
    known = dict.fromkeys(MONITOR_ARGS[kind], Argument(None))
    for argument, problem in problems_of_arguments(kind, known, config.monitor.monitor_args or {}):
        yield Problem(f"monitor.monitor_args.{argument}", problem)


def _check_gpus(config: Config) -> Iterator[Problem]:
    total = config.cluster.gpus
    trains = config.mode in ("both", "train")
    if not total or config.mode == "train_node":  # its run's first node trains by the same YAML
        return
    rollout, used, taken = config.explorer.rollout_model, 0, ""
    if config.mode != "train":
        used = rollout.engine_num * rollout.tensor_parallel_size
        taken = f"{rollout.engine_num} engines of {rollout.tensor_parallel_size} GPU(s) take {used}"
        auxiliary = sum(model.gpus for model in config.explorer.auxiliary_models)
        taken += f" and the auxiliary models {auxiliary}" if auxiliary else ""
        taken += f" of the cluster's {total} GPUs"
        used += auxiliary
    left, ranks = total - used, config.trainer.num_ranks
    if left < 0:
        yield Problem("explorer.rollout_model.engine_num", f"{taken}, more than there are")
    elif trains and not left:  # the trainer shares the engines' GPUs
        shared = rollout.engine_num * rollout.tensor_parallel_size
        if ranks and ranks > shared:
            yield Problem("trainer.num_ranks", f"is {ranks}, but the engines, whose GPUs it shares, have {shared}")
    elif trains and ranks and ranks > left:
        yield Problem("trainer.num_ranks", f"is {ranks}, but {left} of the cluster's {total} GPUs are left for it")


def _unknown(name: str, known: Iterable[str]) -> str:
    foreign_keys = satellites.find("foreign_keys")
    if foreign_keys is None and name in OF_TRINITY_RFT:
        return f"is {name!r}, which is in {satellites.missing('workflows')}"
    if foreign_keys and name in foreign_keys.NOT_HERE:
        return f"is {name!r}, which Trinity-RFT has and Trinity has not; {foreign_keys.NOT_HERE[name]}"
    return f"is {name!r:.100}, which is not registered; {did_you_mean(name, known)} {OF_PLUGINS}"


def check_rope(config: Config) -> Iterator[Problem]:
    """Finds numbers that the kind of scaling needs or does not take; trinity.data.rope applies them."""
    scaling = config.model.rope_scaling
    if scaling is None:
        return
    kind, given = scaling.rope_type, {*scaling.model_dump(exclude_none=True)} - {"rope_type"}
    for name in _ROPE_NEEDS[kind]:
        if name not in given:
            yield Problem(f"model.rope_scaling.{name}", f"is missing; rope_type {kind} needs it")
    for name in sorted(given - {*_ROPE_TAKES[kind]}):
        yield Problem(f"model.rope_scaling.{name}", f"is not of rope_type {kind}; remove it")
