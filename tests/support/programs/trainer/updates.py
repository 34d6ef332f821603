"""Trainer engines one after the other in one process, on a tiny model and fixed batches; what was seen comes back.

python -m support.programs.trainer.updates MODEL FOLDER RESULT.json updates | memory
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from support.programs.forked import ForkedModule
from support.programs.trainer.training import BASE, fixed_batch, make_gpt2, of_experiences, recorded, wait_for
from trinity.runtime.process import free_port

Seen = dict[str, Any]
# ZeRO stage, limit of the gradient's norm, dtype: what becomes of a gradient that is not finite differs between them.
SHARDINGS = [
    (0, 0.5, "float32"), (0, 0.0, "float32"), (2, 0.5, "float32"), (3, 0.5, "float32"),
    (0, 0.5, "bfloat16"), (1, 0.5, "bfloat16"), (2, 0.5, "bfloat16"), (2, 0.0, "bfloat16"), (3, 0.5, "bfloat16"),
]  # fmt: skip
# ZeRO stage, which activations are recomputed: with compiled kernels.
KERNELS: list[tuple[int, bool | str]] = [(2, False), (2, "mlp"), (3, False), (3, "mlp"), (3, True)]

# What needs the reference: a loss of pairs, KL in the loss, KL in the reward and the loss.
PASSES: dict[str, dict[str, Any]] = {
    "pairs": {"algorithm_type": "dpo", "kl_loss_fn": "none"},
    "loss": {"kl_loss_fn": "k2"},
    "both": {"kl_loss_fn": "k2", "kl_penalty_fn": "k2"},
}


def see(model: Path, folder: Path, which: str = "updates", seconds: float = 170) -> Seen:
    """The requested parts of the results below, by name."""
    port = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = {**os.environ, **port, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    result, output = folder / "seen.json", folder / "seen.out"
    arguments = [str(model), str(folder), str(result), which]
    codes = wait_for([ForkedModule("support.programs.trainer.updates", arguments, environment, output)], seconds)
    assert codes == [0], output.read_text(errors="replace")[-4000:]
    found: Seen = json.loads(result.read_text())
    return found


def engine_of(model: str, zero: int, algorithm: dict[str, Any], trainer: dict[str, Any]) -> Any:
    from trinity.config import make_plan
    from trinity.config.schema import Config
    from trinity.trainer.engine import TrainEngine
    from trinity.trainer.process.ranks import ranks_from_environment

    config = json.loads(json.dumps(BASE))
    config["model"]["model_path"] = model
    sharding = {"zero_stage": zero, "dtype": "float32", **trainer.get("deepspeed", {})}
    config["trainer"] |= {**trainer, "deepspeed": sharding}
    config["algorithm"] |= algorithm
    return TrainEngine(make_plan(Config.model_validate(config)), ranks_from_environment(1), "cpu")


def weights_of(engine: Any) -> dict[str, np.ndarray]:
    return {name: tensor.float().clone().numpy() for name, tensor in engine.weights.read()}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def resumed(model: str, folder: Path, algorithm: dict[str, Any], trainer: dict[str, Any], zero: int = 2) -> Seen:
    """Four steps in one engine; and two steps, a checkpoint, and a new engine for the other two."""
    through = engine_of(model, zero, algorithm, trainer)
    before, metrics, after_first = weights_of(through), [], {}
    for step in range(1, 5):
        metrics.append(through.train(fixed_batch(step), 100))
        if step == 1:
            after_first = weights_of(through)
        if step == 2:
            through.snapshot(folder / "actor", {"step": 2})()
    again = engine_of(model, zero, algorithm, trainer)
    again.load(folder / "actor")
    later = [again.train(fixed_batch(step), 100) for step in (3, 4)]
    return {
        "metrics": metrics,
        "metrics_are_the_same": later == metrics[2:],
        "weights_are_the_same": same(weights_of(through), weights_of(again)),
        "first_step_changed_the_policy": not same(before, after_first),
        "files": sorted(path.name for path in folder.iterdir()),
    }


def spoilt(model: str, zero: int, clip: float, dtype: str, kind: str) -> Seen:
    """A step, then one whose loss or gradient is not finite, then a good one again."""
    from trinity.trainer.data.bad_steps import BadStep

    engine = engine_of(model, zero, {}, {"grad_clip": clip, "deepspeed": {"dtype": dtype}})
    engine.train(fixed_batch(1), 100)
    before, batch, problem = weights_of(engine), fixed_batch(2), ""
    sequences, backward = list(batch.sequences), engine._model.backward
    if kind == "loss":
        nan = np.full(sequences[3].response_length, np.nan, np.float32)
        sequences[3] = replace(sequences[3], old_logprobs=nan)
    else:
        engine._model.backward = lambda loss: backward(loss * float("inf"))
    try:
        engine.train(replace(batch, sequences=tuple(sequences)), 100)
    except BadStep as error:
        problem = str(error)
    unchanged, engine._model.backward = same(before, weights_of(engine)), backward
    good = engine.train(fixed_batch(3), 100)
    return {"problem": problem, "unchanged": unchanged, "then": good["grad_norm"]}


def short_of_memory(model: str, zero: int, failures: int, place: str = "forward") -> Seen:
    """Memory runs out within this many micro-batches, from the second one on: forward, or backward."""
    import torch

    from trinity.trainer.data.bad_steps import BadStep

    trainer = {"max_token_len_per_gpu": 64, "gradient_checkpointing": True}
    plain, short = (engine_of(model, zero, {}, trainer) for _ in range(2))
    tries, rows = [0], []
    forward = short.policy.forward

    def noting(micro: Any, *rest: Any) -> Any:
        rows.append(len(micro.mask))
        return forward(micro, *rest)

    def fail(*_: Any) -> None:
        tries[0] += 1
        if 1 < tries[0] <= 1 + failures:
            raise torch.OutOfMemoryError("out of memory")

    def after_a_layer(_module: Any, _inputs: Any, output: Any) -> None:
        if place == "forward":
            fail()
        elif output.requires_grad:
            output.register_hook(fail)

    short.policy.forward = noting
    hook = short.policy.model.model.layers[0].mlp.register_forward_hook(after_a_layer)
    before, problem, found, expected = weights_of(short), "", {}, {}
    batch, records = of_experiences(fixed_batch(1)), [engine.token_record() for engine in (plain, short)]
    try:
        found = short.train(batch, 100, records[1])
        expected = plain.train(batch, 100, records[0])
    except BadStep as error:
        problem = str(error)
    unchanged, apart = same(before, weights_of(short)), largest_difference(weights_of(plain), weights_of(short))
    hook.remove()
    short.policy.forward = forward
    then = [engine.train(fixed_batch(2), 100)["grad_norm"] for engine in (plain, short)]
    tokens = [recorded(record.values(batch.sequences)) for record in records]
    return {
        "tokens_apart": largest_difference(*tokens) if found else None,
        "problem": problem, "unchanged": unchanged, "expected": expected, "found": found, "rows": rows, "apart": apart,
        "then": then,
    }  # fmt: skip


def looked_at_in_halves(model: str, failures: int) -> Seen:
    """Memory runs out while log-probabilities are computed before the first update of two."""
    import torch

    from trinity.trainer.data.bad_steps import BadStep

    trainer = {"max_token_len_per_gpu": 64, "epochs_per_batch": 2}
    plain, short = (engine_of(model, 2, {}, trainer) for _ in range(2))
    expected, calls, problem, found = plain.train(fixed_batch(1), 100), [0], "", {}
    forward = short.policy.forward

    def failing(micro: Any, *rest: Any) -> Any:
        calls[0] += 1
        if calls[0] <= failures:
            raise torch.OutOfMemoryError("out of memory")
        return forward(micro, *rest)

    short.policy.forward = failing
    try:
        found = short.train(fixed_batch(1), 100)
    except BadStep as error:
        problem = str(error)
    return {"problem": problem, "expected": expected, "found": found}


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def offloaded(model: str, algorithm: dict[str, Any]) -> Seen:
    """Two steps with the reference on the device, and in host memory; number of its moves to the device."""
    beside, away = (
        engine_of(model, 2, algorithm, {"mini_batch_size": 8, "deepspeed": {"offload_reference": offload}})
        for offload in (False, True)
    )
    visits, on_device = [0], away.reference.on_device

    def counted() -> Any:
        visits[0] += 1
        return on_device()

    away.reference.on_device = counted
    metrics = [[engine.train(fixed_batch(step), 100) for step in (1, 2)] for engine in (beside, away)]
    return {"beside": metrics[0], "away": metrics[1], "visits": visits[0]}


def passes_of_the_reference(model: str, algorithm: dict[str, Any]) -> Seen:
    """A step of two epochs, with the reference on the device and in host memory: number of its sequences."""
    found = {}
    for offload in (False, True):
        engine = engine_of(model, 2, algorithm, {"epochs_per_batch": 2, "deepspeed": {"offload_reference": offload}})
        module, rows = engine.reference._model if offload else engine.reference, [0]
        module.register_forward_hook(lambda _, given, __, rows=rows: rows.append(len(given[0].mask)))
        pairs = [(index // 2 + 1) * (-1) ** index for index in range(16)]
        batch = fixed_batch(1)
        batch = replace(batch, sequences=tuple(replace(s, pair=p) for s, p in zip(batch.sequences, pairs, strict=True)))
        metrics = engine.train(batch, 100)
        found["away" if offload else "beside"] = {"metrics": metrics, "sequences": sum(rows)}
    return found


def critic_alone(model: str) -> list[float]:
    """The value loss of the same batch, again and again."""
    trainer = {"critic": {"optimizer": {"lr": 1e-2}, "warmup_steps": 100, "cliprange_value": 0.0}}
    engine = engine_of(model, 2, {"algorithm_type": "ppo"}, trainer)
    return [engine.train(replace(fixed_batch(1), step=step), 100)["critic/value_loss"] for step in range(1, 16)]


def with_kernels(model: str, zero: int, recompute: bool | str) -> Seen:
    """Two steps with compiled kernels, and without."""
    from support.fakes.models.compiled import kernels_on_cpu

    trainer = {"gradient_checkpointing": recompute, "max_token_len_per_gpu": 64}
    with kernels_on_cpu():
        fused = engine_of(model, zero, {}, trainer)
        found = [fused.train(fixed_batch(step), 100) for step in (1, 2)]
    plain = engine_of(model, zero, {}, trainer)
    return {"found": found, "expected": [plain.train(fixed_batch(step), 100) for step in (1, 2)]}


def nothing_to_learn(model: str) -> Seen:
    """A batch whose masks are all empty, and one whose responses have no tokens."""
    engine = engine_of(model, 2, {}, {})
    engine.train(fixed_batch(1), 100)
    before, batch = weights_of(engine), fixed_batch(2)
    masked = tuple(replace(s, mask=np.zeros_like(s.mask)) for s in batch.sequences)
    none = np.zeros(0, np.float32)
    short = tuple(
        replace(s, token_ids=s.token_ids[: s.prompt_length], old_logprobs=none, mask=none.astype(bool)) for s in masked
    )
    updates = [engine.train(replace(batch, sequences=sequences), 100)["updates"] for sequences in (masked, short)]
    return {"updates": updates, "unchanged": same(before, weights_of(engine))}


def tokens_of_updates(model: str) -> Seen:
    """Two passes of four updates: the recorded values of tokens, and the outputs of the model when it last saw each
    token, and before the step. Also of a step that only trains the critic."""
    import torch

    engine = engine_of(model, 2, {"kl_loss_fn": "none"}, {"mini_batch_size": 5, "epochs_per_batch": 2})
    batch, forward = of_experiences(fixed_batch(1)), engine.policy.forward
    last: dict[tuple[int, ...], list[Any]] = {}
    before = engine._preparer.logprobs(batch, engine._model)

    def noting(micro: Any, *rest: Any) -> Any:
        found, ids, ends = forward(micro, *rest), micro.input_ids[0].tolist(), micro.boundaries.tolist()
        if torch.is_grad_enabled():
            for row, (first, end) in enumerate(pairwise(ends)):
                last[tuple(ids[first:end])] = [values[row].detach().numpy() for values in found]
        return found

    engine.policy.forward = noting
    record = engine.token_record()
    metrics = engine.train(batch, 100, record)
    seen = [(last[tuple(s.token_ids.tolist())], s.response_length) for s in batch.sequences]
    expected = {
        name: np.concatenate([of[at][:count] for of, count in seen]) for at, name in enumerate(("logprobs", "entropy"))
    }
    found = recorded(record.values(batch.sequences))
    clipped, proximal = found.pop("clipped"), found.pop("proximal_logprobs")
    alone = engine_of(model, 0, {"algorithm_type": "ppo"}, {"critic": {"optimizer": {"lr": 1e-2}, "warmup_steps": 1}})
    nothing = alone.token_record()
    warm = of_experiences(fixed_batch(1))
    alone.train(warm, 100, nothing)
    return {
        "apart": largest_difference(found, expected),
        "proximal_apart": float(np.abs(proximal - np.concatenate(before)).max()),
        "moved": float(np.abs(found["logprobs"] - proximal).max()),
        "clipped": [int(clipped.sum()), len(clipped)],
        "updates": metrics["updates"],
        "of_the_critic_alone": [one is None for one in nothing.values(warm.sequences)],
    }


def scenarios(model: str, folder: Path) -> Iterator[tuple[str, Any]]:
    several = {"mini_batch_size": 5, "epochs_per_batch": 2}
    critic = {"critic": {"optimizer": {"lr": 1e-2}, "warmup_steps": 1}, "mini_batch_size": 8}
    yield "several", resumed(model, folder / "several", {"kl_loss_fn": "none"}, several)
    yield "critic", resumed(model, folder / "critic", {"algorithm_type": "ppo"}, critic, zero=0)
    yield "dropout", resumed(str(make_gpt2(folder / "gpt2")), folder / "dropout", {"kl_loss_fn": "none"}, {})
    yield "reference_in_loss", offloaded(model, {})
    yield "reference_in_reward", offloaded(model, {"kl_penalty_fn": "k2", "kl_loss_fn": "none"})
    for name, algorithm in PASSES.items():
        yield f"passes_{name}", passes_of_the_reference(model, algorithm)
    yield "critic_alone", critic_alone(model)
    yield "nothing", nothing_to_learn(model)
    yield "tokens", tokens_of_updates(model)
    for zero, recompute in KERNELS:
        yield f"kernels_{zero}_{recompute}", with_kernels(model, zero, recompute)
    for zero, clip, dtype in SHARDINGS:
        for kind in ("loss", "gradient"):
            yield f"{kind}_{zero}_{clip}_{dtype}", spoilt(model, zero, clip, dtype, kind)


def memory_scenarios(model: str) -> Iterator[tuple[str, Any]]:
    for zero in (0, 1, 2, 3):
        for place in ("forward", "backward"):
            yield f"{zero}_{place}", short_of_memory(model, zero, 1, place)
    yield "for_ever", short_of_memory(model, 2, 99, "backward")
    for failures in (1, 2):
        yield f"looking_{failures}", looked_at_in_halves(model, failures)


def main() -> None:
    import torch

    torch.set_num_threads(1)
    model, folder, result = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    seen = memory_scenarios(model) if sys.argv[4] == "memory" else scenarios(model, folder)
    result.write_text(json.dumps(dict(seen)))


if __name__ == "__main__":
    main()
