"""Checks before the start that this machine's GPUs can hold a plan. Problems are text with numbers and a fix.

trinity.runtime.devices finds the GPUs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trinity.config.errors import Problem
from trinity.config.memory import (
    ENGINE_BESIDE_GIB,
    TRAINER_BESIDE_GIB,
    Sharding,
    cache_gib,
    certain_gib,
    cpu_gib,
    host_gib,
    parameters_of,
    recomputing_gib,
    tokens_in,
    training_gib,
    weights_gib,
)
from trinity.config.plan import Plan
from trinity.config.schema.explorer import RolloutModelConfig
from trinity.runtime.devices import Gpu, TorchBuild, mismatch

_ZERO = "trainer.deepspeed.zero_stage"
_HIGHEST_UTILIZATION = 0.95
# A GPU that engine and trainer share: the part neither takes, and the engine's part for a model of unknown size.
_UNUSED_GIB, _PART_OF_UNKNOWN = 1.0, 0.35
_MOST_SEQUENCES = 1024  # that vLLM runs at once on a large GPU


def problems(plan: Plan, gpus: Sequence[Gpu], torch: TorchBuild | None, host_memory_gib: float) -> Iterator[Problem]:
    """Yields the reasons why the plan cannot run on these GPUs; without GPUs, on this machine's CPU."""
    split, trains = plan.gpus, plan.config.mode in ("both", "train")
    if not gpus:
        yield from _check_cpu(plan, host_memory_gib)
        yield from _check_ranks(plan, plan.config.trainer.num_ranks or 1)
        return
    if why := mismatch(gpus, torch):
        yield Problem("cluster.gpu_per_node", why)
        return
    cards = list(gpus[: plan.config.cluster.gpu_per_node or len(gpus)])
    wanted = split.explorer + split.auxiliary
    if shares(plan, len(cards)):
        yield from _check_shared(plan, cards[: split.explorer], host_memory_gib)
        yield from _check_ranks(plan, ranks_sharing(plan))
        return
    if wanted + trains > len(cards):
        yield _too_few(plan, len(cards), wanted, trains)
        return
    if split.explorer:
        yield from _check_engines(plan, cards[:wanted])
    if trains:
        left = cards[wanted:][: plan.config.trainer.num_ranks]
        yield from _check_trainer(plan, left, host_memory_gib)
        yield from _check_ranks(plan, len(left))


@dataclass(frozen=True)
class MemorySplit:
    """One GPU's memory in GiB: what the engine may take, and what a rank of the trainer may take."""

    engine: float
    trainer: float


def shares(plan: Plan, gpus: int) -> bool:
    """Tells if the trainer shares the engines' GPUs: they need all `gpus` of this machine."""
    split = plan.gpus
    return plan.config.mode == "both" and split.explorer > 0 and split.explorer + split.auxiliary == gpus


def split_memory(plan: Plan, card: Gpu, ranks: int, host_memory_gib: float = 0.0) -> MemorySplit | Problem:
    """Divides this GPU between an engine and a rank. Returns a Problem with numbers and a fix if both do not fit.

    Both get what they need at least. Of the rest the engine gets half, at most what all outstanding rollouts need at
    full length; gpu_memory_utilization in the YAML decides instead.
    """
    rollout, room = plan.config.explorer.rollout_model, card.total_gib - _UNUSED_GIB
    given = "gpu_memory_utilization" in rollout.model_fields_set
    path = plan.config.model.model_path
    known = parameters_of(path)
    if known is None:
        engine = card.total_gib * (rollout.gpu_memory_utilization if given else _PART_OF_UNKNOWN)
        return MemorySplit(engine, room - engine)
    sharding = Sharding.of(plan, ranks)
    states = training_gib(plan, known[0], sharding)
    trainer = states + TRAINER_BESIDE_GIB + recomputing_gib(path, plan.micro_batch_tokens)
    fixed = weights_gib(known[0], rollout) + ENGINE_BESIDE_GIB
    parallel, length = rollout.tensor_parallel_size, plan.lengths.model
    least = fixed + cache_gib(path, length, parallel)
    if given:
        engine = rollout.gpu_memory_utilization * card.total_gib
        if engine + trainer <= room:
            return MemorySplit(engine, room - engine)
        said = f"is {rollout.gpu_memory_utilization:g}: {engine:.1f} of {card}, which the trainer shares and needs "
        said += f"{trainer:.1f} GiB of"
        if least + trainer <= room:
            said += f"; set it to {int(100 * (room - trainer) / card.total_gib) / 100:g} at most, or leave it out"
            return Problem("explorer.rollout_model.gpu_memory_utilization", said)
    if least + trainer > room:
        return Problem(
            "explorer.rollout_model.engine_num",
            f"engine and trainer share {card}: the engine needs at least {least:.1f} GiB (weights, keys and values of "
            f"one sequence of {length} tokens, {ENGINE_BESIDE_GIB:g} beside), the trainer {trainer:.1f} (states "
            f"{states:.1f}); {suggest_fix(plan, known[0], sharding, room - least - trainer + states, host_memory_gib)}"
            ", or use another GPU",
        )
    rollouts = plan.outstanding_groups * plan.config.algorithm.repeat_times
    wish = fixed + cache_gib(path, min(rollouts, _MOST_SEQUENCES) * length, parallel)
    engine = least + min(max(0.0, wish - least), (room - least - trainer) / 2)
    return MemorySplit(engine, room - engine)


def ranks_sharing(plan: Plan) -> int:
    """Ranks of a trainer that shares the engines' GPUs."""
    return min(plan.config.trainer.num_ranks or plan.gpus.explorer, plan.gpus.explorer)


def describe_sharing(plan: Plan, gpus: Sequence[Gpu]) -> str:
    """Describes the division of each GPU between engine and trainer; empty where they do not share, or do not fit."""
    cards = list(gpus[: plan.config.cluster.gpu_per_node or len(gpus)])
    if not shares(plan, len(cards)):
        return ""
    card = min(cards[: plan.gpus.explorer], key=lambda card: card.total_gib)
    split = split_memory(plan, card, ranks_sharing(plan))
    if isinstance(split, Problem):
        return ""
    return f"engine and trainer share each GPU: {split.engine:.1f} and {split.trainer:.1f} GiB of {card}"


def _check_shared(plan: Plan, cards: Sequence[Gpu], host_memory_gib: float) -> Iterator[Problem]:
    ranks = ranks_sharing(plan)
    for card in cards:
        if isinstance(split := split_memory(plan, card, ranks, host_memory_gib), Problem):
            yield split
            return


def _too_few(plan: Plan, here: int, wanted: int, trains: bool) -> Problem:
    rollout, auxiliary = plan.config.explorer.rollout_model, plan.gpus.auxiliary
    needs = f"{rollout.engine_num} engine(s) of {rollout.tensor_parallel_size} GPU(s)"
    needs += f", auxiliary models on {auxiliary}" if auxiliary else ""
    needs += " and at least one for the trainer" if trains else ""
    room = (here - trains - auxiliary) // rollout.tensor_parallel_size
    if room > 0:
        advice = f"set it to {room}"
    elif here - trains - auxiliary > 0:
        advice = f"set explorer.rollout_model.tensor_parallel_size to {here - trains - auxiliary} or less"
    else:
        advice = f"this takes {wanted + trains} GPUs; set CUDA_VISIBLE_DEVICES to nothing, to run on the CPU"
    return Problem("explorer.rollout_model.engine_num", f"{needs} do not fit on the {here} GPU(s) here; {advice}")


def _check_cpu(plan: Plan, host_memory_gib: float) -> Iterator[Problem]:
    known = parameters_of(plan.config.model.model_path)
    if known is None or not host_memory_gib:
        return
    needed = cpu_gib(plan, known[0])
    if needed > host_memory_gib:
        yield Problem(
            "model.model_path",
            f"has {known[0] / 1e9:.2f} billion parameters {known[1]}; there is no GPU here, and on the CPU they take "
            f"{needed:.1f} GiB, of which {host_memory_gib:.1f} are available; use GPUs or a smaller model",
        )


def _check_ranks(plan: Plan, ranks: int) -> Iterator[Problem]:
    """Checks ranks against GPUs without `num_ranks`; with it the checks of the YAML have compared both."""
    size, trainer = plan.config.trainer.ulysses_sequence_parallel_size, plan.config.trainer
    if plan.config.mode in ("both", "train") and not trainer.num_ranks and ranks % size:
        problem = f"is {size}, which does not divide the {ranks} rank(s) of the trainer here; set trainer.num_ranks"
        yield Problem("trainer.ulysses_sequence_parallel_size", problem)


def _check_trainer(plan: Plan, cards: Sequence[Gpu], host_memory_gib: float) -> Iterator[Problem]:
    known = parameters_of(plan.config.model.model_path)
    if known is None or not cards:
        return
    count, least, cluster = known[0], min(cards, key=lambda card: card.total_gib), plan.config.cluster
    now = Sharding.of(plan, len(cards) * cluster.nodes)
    needed = certain_gib(plan, count, now)
    if needed > least.total_gib:
        yield Problem(
            _ZERO,
            f"is {now.zero_stage}: weights and training states of {count / 1e9:.2f} billion parameters take "
            f"{needed:.1f} GiB on each of {now.ranks} rank(s), more than {least} has; "
            f"{suggest_fix(plan, count, now, least.total_gib, host_memory_gib)}",
        )
    elif (beside := host_gib(plan, count, now) * len(cards)) > host_memory_gib > 0:
        yield Problem(
            "trainer.deepspeed.offload_optimizer",
            f"needs {beside:.1f} GiB of this machine's memory, {host_memory_gib:.1f} are available; "
            f"without it a rank takes {certain_gib(plan, count, now.without_offload()):.1f} GiB of its GPU",
        )
    for machines in range(cluster.nodes - 1, cluster.fewest_nodes - 1, -1):
        fewer = Sharding.of(plan, len(cards) * machines)
        if needed <= least.total_gib < (gib := certain_gib(plan, count, fewer)):
            problem = f"weights and training states take {gib:.1f} GiB on each of {fewer.ranks} rank(s) of {machines}"
            fix = f"more than {least} has; set it to {machines + 1}"
            yield Problem("cluster.least_nodes", f"is {cluster.fewest_nodes}, but {problem} machine(s), {fix}")
            return


def suggest_fix(plan: Plan, count: float, now: Sharding, room_gib: float, host_memory_gib: float) -> str:
    """The first of more sharding, offloading and more GPUs by which the training states fit into `room_gib`."""
    for said, sharding in now.smaller():
        gib, host = certain_gib(plan, count, sharding), host_gib(plan, count, sharding) * sharding.ranks
        if gib < room_gib and (not host_memory_gib or host < host_memory_gib):
            beside = f" and {host:.1f} GiB of host memory" if host else ""
            return f"with {said} it is {gib:.1f} GiB a rank{beside}"
    ranks = next((n for n in range(now.ranks + 1, 1025) if certain_gib(plan, count, Sharding(n, 3)) < room_gib), None)
    more = f"ZeRO 3 needs {ranks} such GPUs for the trainer" if ranks else "no number of such GPUs is enough"
    return f"{more}; or train only adapters (model.lora_configs)"


def _check_engines(plan: Plan, cards: Sequence[Gpu]) -> Iterator[Problem]:
    rollout, config = plan.config.explorer.rollout_model, plan.config
    models: list[tuple[str, str, RolloutModelConfig, int]] = [
        ("explorer.rollout_model", config.model.model_path, rollout, plan.lengths.model)
    ]
    for index, further in enumerate(config.explorer.auxiliary_models):
        length = further.max_model_len or plan.lengths.model
        if further.external_model:
            continue
        models.append((f"explorer.auxiliary_models.{index}", further.model_path, further, length))
    first = 0
    for key, path, model, length in models:
        taken = cards[first : first + model.engine_num * model.tensor_parallel_size]
        first += len(taken)
        if taken:
            yield from _check_engine(key, path, model, length, min(taken, key=lambda card: card.total_gib))


def _check_engine(key: str, path: str, model: RolloutModelConfig, length: int, card: Gpu) -> Iterator[Problem]:
    """Weights and the key-value cache of one sequence must fit into what the engine may take."""
    known, parallel, part = parameters_of(path), model.tensor_parallel_size, model.gpu_memory_utilization
    if known is None:
        return
    weights, cache, room = weights_gib(known[0], model), cache_gib(path, length, parallel), part * card.total_gib
    if weights + cache <= room:
        return
    said = (
        f"is {part:g}: {room:.1f} of {card}; the weights take {weights:.1f} GiB a GPU, and the key-value cache of one "
        f"sequence of {length} tokens {cache:.1f} GiB"
    )
    needed = (weights + cache) / card.total_gib
    if needed < _HIGHEST_UTILIZATION:
        advice = f"set it to {needed + 0.05:.2f} at least"
    elif weights < _HIGHEST_UTILIZATION * card.total_gib and (
        fits := tokens_in(path, _HIGHEST_UTILIZATION * card.total_gib - weights, parallel)
    ):
        advice = f"set it to {_HIGHEST_UTILIZATION}, and the lengths to {fits} tokens together at most"
    else:
        parts = next((n for n in (2, 4, 8, 16) if (weights + cache) * parallel / n <= room), 16)
        advice = f"set {key}.tensor_parallel_size to {parts}"
    yield Problem(f"{key}.gpu_memory_utilization", f"{said}; {advice}")
