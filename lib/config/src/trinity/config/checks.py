"""Contradictions between keys, found before anything starts."""

import difflib
from collections.abc import Iterable, Iterator

from trinity.config.algorithms import ALGORITHMS, PARTS
from trinity.config.errors import Problem
from trinity.config.schema import Config
from trinity.config.stages import expand
from trinity.config.workflows import REWARD_FUNCTIONS, WORKFLOWS


def check(config: Config) -> Iterator[Problem]:
    """Every contradiction in the configuration and in each of its stages."""
    names = [stage.stage_name for stage in config.stages]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(f"stages.{index}.stage_name", f"is {name!r}, which another stage has already")
    seen: set[Problem] = set()
    for index, stage in enumerate(expand(config)):
        for problem in _check_stage(stage):
            section = problem.path.split(".")[0]
            own = config.stages and (section == "mode" or getattr(config.stages[index], section, None) is not None)
            placed = Problem(f"stages.{index}.{problem.path}" if own else problem.path, problem.message)
            if placed not in seen:
                seen.add(placed)
                yield placed


def _check_stage(config: Config) -> Iterator[Problem]:
    yield from _check_algorithm(config)
    if config.algorithm.algorithm_type not in ALGORITHMS:
        return
    yield from _check_lengths(config)
    if ALGORITHMS[config.algorithm.algorithm_type].offline:
        yield from _check_offline(config)
    else:
        yield from _check_online(config)


def _check_algorithm(config: Config) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.algorithm_type not in ALGORITHMS:
        yield Problem("algorithm.algorithm_type", _unknown(algorithm.algorithm_type, ALGORITHMS))
        return
    for key, registry, attribute in PARTS:
        name = getattr(algorithm, key) or getattr(ALGORITHMS[algorithm.algorithm_type], attribute)
        if name is not None and name not in registry:
            yield Problem(f"algorithm.{key}", _unknown(name, registry))
            continue
        for argument in getattr(algorithm, f"{key}_args") or {}:
            known = registry[name] if name is not None else {}
            if argument not in known:
                yield Problem(
                    f"algorithm.{key}_args.{argument}", f"{name} has no such argument; {_near(argument, known)}"
                )


def _check_lengths(config: Config) -> Iterator[Problem]:
    model = config.model
    joins = config.mode == "explore"  # what it leaves out comes from the run it joins
    if not model.model_path and not joins:
        yield Problem("model.model_path", "is empty; give the folder or hub name of a model")
    total, prompt, response = model.max_model_len, model.max_prompt_tokens, model.max_response_tokens
    if total is None and (prompt is None or response is None):
        if joins:
            return
        yield Problem("model.max_model_len", "cannot be derived; give it, or max_prompt_tokens and max_response_tokens")
    elif total is not None and prompt is not None and response is not None and prompt + response > total:
        yield Problem(
            "model.max_model_len",
            f"is {total}, less than max_prompt_tokens + max_response_tokens = {prompt} + {response}",
        )
    elif total is not None and max(prompt or 0, response or 0) >= total:
        yield Problem("model.max_model_len", f"is {total}, which leaves no token for the other part")


def _check_offline(config: Config) -> Iterator[Problem]:
    kind = config.algorithm.algorithm_type
    if config.mode != "train":
        yield Problem("mode", f"is {config.mode!r}; {kind} learns from a dataset and needs mode: train")
    source = config.buffer.trainer_input.experience_buffer
    if source is None or not source.path:
        yield Problem("buffer.trainer_input.experience_buffer.path", f"is missing; {kind} reads its dataset from it")
    if not config.buffer.train_batch_size:
        yield Problem("buffer.train_batch_size", f"is 0; {kind} needs the number of rows per optimizer step")


def _check_online(config: Config) -> Iterator[Problem]:
    buffer, repeat = config.buffer, config.algorithm.repeat_times
    if buffer.train_batch_size % repeat:
        yield Problem(
            "buffer.train_batch_size",
            f"is {buffer.train_batch_size}, must be a multiple of algorithm.repeat_times = {repeat}",
        )
    source = buffer.explorer_input
    if source.taskset is not None and source.tasksets:
        yield Problem("buffer.explorer_input.tasksets", "is given beside taskset; use one of them")
    if source.taskset is None and not source.tasksets and config.mode != "explore":
        yield Problem("buffer.explorer_input.taskset", f"is missing; {config.algorithm.algorithm_type} needs tasks")
    if len(source.tasksets) > 1:
        yield Problem("buffer.explorer_input.tasksets", "more than one taskset is not supported; put them in one file")
    yield from _check_tasksets(config)
    yield from _check_gpus(config)


def _check_tasksets(config: Config) -> Iterator[Problem]:
    source = config.buffer.explorer_input
    named = [("taskset", source.taskset)] if source.taskset else []
    named += [(f"tasksets.{i}", t) for i, t in enumerate(source.tasksets)]
    named += [(f"eval_tasksets.{i}", t) for i, t in enumerate(source.eval_tasksets)]
    for key, taskset in named:
        place = f"buffer.explorer_input.{key}"
        for field, registry in (("default_workflow_type", WORKFLOWS), ("default_reward_fn_type", REWARD_FUNCTIONS)):
            name = getattr(taskset, field) or getattr(source, field)
            if name is not None and name not in registry:
                yield Problem(f"{place}.{field}", _unknown(name, registry))


def _check_gpus(config: Config) -> Iterator[Problem]:
    total = config.cluster.node_num * config.cluster.gpu_per_node
    rollout = config.explorer.rollout_model
    wanted = rollout.engine_num * rollout.tensor_parallel_size
    if config.mode == "both" and total and wanted >= total:
        yield Problem(
            "explorer.rollout_model.engine_num",
            f"{rollout.engine_num} engines of {rollout.tensor_parallel_size} GPU(s) take {wanted} of the cluster's "
            f"{total} GPUs and leave none for the trainer",
        )


def _unknown(name: str, known: Iterable[str]) -> str:
    return f"is {name!r}, which is not registered; {_near(name, known)}"


def _near(name: str, known: Iterable[str]) -> str:
    options = sorted(known)
    near = difflib.get_close_matches(name, options, n=3)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(options) or 'none'}"
