"""Ranks of the trainer's engine that do what a list says, on a tiny model; what was dumped comes back as arrays.

python -m support.programs.trainer.engine_actions JOB.json      (one process per rank, with torchrun's variables)
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from support.programs.trainer.training import BASE, fixed_batch, save_as_before, start_module, wait_for, with_routes

Dump = dict[str, np.ndarray]


def act(
    folder: Path,
    model: Path,
    actions: list[list[Any]],
    *,
    ranks: int,
    zero: int,
    dtype: str = "float32",
    seconds: float = 150,
    changes: dict[str, dict[str, Any]] | None = None,
) -> tuple[dict[str, Dump], dict[str, Any]]:
    """Dumps by name, and found values by name. `changes`: keys of sections of the configuration.

    Actions: ["train", step], or with random routes ["train", step, layers, chosen, experts],
    ["dump", name], ["load", name of a dump], ["base"],
    ["probe", name, sequences] (and another name: that of the other head),
    ["save", name], ["resume", name of what was saved], ["save as before", name]: in DeepSpeed's own form,
    ["masters", name of a dump], ["moments", name of a dump]: float32 weights and the optimizer's states, whole,
    ["whole", name of a dump], ["trained", name],
    ["recomputed"]: which parts of the first layer of policy and critic recompute their activations.
    """  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(json.dumps(BASE))
    config["model"]["model_path"] = str(model)
    config["checkpoint_root_dir"] = str(folder)
    config["trainer"]["deepspeed"] = {"zero_stage": zero, "dtype": dtype}
    config["synchronizer"] = {"bucket_mib": 1}
    for section, keys in (changes or {}).items():
        config[section] |= keys
    job = folder / "job.json"
    job.write_text(json.dumps({"config": config, "folder": str(folder), "actions": actions}))
    run_module("support.programs.trainer.engine_actions", job, ranks, seconds)
    dumps = {path.stem: dict(np.load(path)) for path in folder.glob("*.npz")}
    return dumps, json.loads((folder / "found.json").read_text())


def run_module(module: str, job: Path, ranks: int, seconds: float) -> None:
    """One process a rank; all must end well."""
    output = job.with_suffix(".out")
    processes = start_module(module, job, ranks, output)
    codes = wait_for(processes, seconds)
    assert codes == [0] * ranks, output.read_text(errors="replace")[-4000:]


def recomputed(model: Any) -> list[str]:
    """Parts of the first layer that recompute their activations: transformers marks layers, the trainer marks MLPs."""
    from trinity.trainer.model.checkpointing import RECOMPUTE

    layer = model.model.base_model.layers[0]
    parts = {"layer": layer.gradient_checkpointing, "mlp": getattr(layer.mlp, RECOMPUTE, False)}
    return [name for name, marked in parts.items() if marked]


def elements_with_states(engine: Any) -> int:
    """This rank's first moments, padding included."""
    states = engine._model.optimizer.state.values()
    return sum(state["exp_avg"].numel() for state in states)


def whole_state(model: Any, masters: bool) -> dict[str, Any]:
    """Float32 weights, or the optimizer's states, by DeepSpeed's own functions and not by those that are tested.

    Names of states are `<state>/<parameter>`; the count of updates is among them.
    """
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, Any] = {}
    wrapper = model.engine.optimizer
    held: dict[int, Any] = {}
    if not model.zero_stage and hasattr(wrapper, "fp32_groups"):
        held = {id(p): m for p, m in zip(wrapper.fp16_groups[0], wrapper.fp32_groups[0], strict=True)}
    if model.zero_stage in (1, 2) and model.optimizer.state:
        wrapper._lazy_init_hp_params_optimizer_state()  # otherwise at the first step
    counts = {float(state["step"]) for state in model.optimizer.state.values()}
    for name, parameter in model.module.named_parameters():
        if not parameter.requires_grad:
            continue
        master = held.get(id(parameter), parameter)
        if masters:
            whole = safe_get_full_fp32_param(parameter) if model.zero_stage else master.detach()
            found[name] = whole.float().reshape(-1).clone()
            continue
        for key in ("exp_avg", "exp_avg_sq"):
            if model.zero_stage:
                state = safe_get_full_optimizer_state(parameter, key)
            else:
                state = model.optimizer.state[master][key]
            found[f"{key}/{name}"] = state.reshape(-1).clone()
    if not masters:
        found["counts"] = torch.tensor(sorted(counts))
    return found


def main() -> None:
    import torch

    from trinity.config import make_plan
    from trinity.config.schema import Config
    from trinity.trainer.engine import TrainEngine
    from trinity.trainer.process.ranks import ranks_from_environment

    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(job["folder"])
    ranks = ranks_from_environment(1)
    engine = TrainEngine(make_plan(Config.model_validate(job["config"])), ranks, "cpu")
    found: dict[str, Any] = {}
    dumps: dict[str, dict[str, torch.Tensor]] = {}
    for verb, *arguments in job["actions"]:
        if verb == "train":
            step, *sizes = arguments
            batch = with_routes(fixed_batch(step), *sizes) if sizes else fixed_batch(step)
            found[f"train {step}"] = engine.train(batch, 100)
        elif verb == "dump":
            dumps[arguments[0]] = {name: tensor.clone() for name, tensor in engine.weights.read()}
        elif verb == "whole":
            weights = engine.weights.whole()[1] if ranks.is_first else engine.weights.read()
            dumps[arguments[0]] = {name: tensor.clone() for name, tensor in weights}
        elif verb == "trained":
            found[arguments[0]] = elements_with_states(engine)
        elif verb == "load":
            engine.weights.load(dumps[arguments[0]].items() if ranks.is_first else None)
        elif verb == "base":
            engine.weights.load(engine.weights.base() if ranks.is_first else None)
        elif verb == "probe":
            name, sequences, *other = arguments
            found[name], of_other_head = engine.probe_logprobs(sequences, both_heads=bool(other))
            found |= dict.fromkeys(other, of_other_head)
        elif verb == "recomputed":
            found["recomputed"] = [recomputed(model) for model in (engine.policy, engine._critic.model.module)]
        elif verb == "save":
            engine.snapshot(folder / arguments[0], {"step": 0})()
        elif verb == "save as before":
            save_as_before(engine, folder / arguments[0], {"step": 0})
        elif verb in ("masters", "moments"):
            dumps[arguments[0]] = whole_state(engine._model, masters=verb == "masters")
        elif verb == "resume":
            engine.load(folder / arguments[0])
        else:
            raise ValueError(verb)
    if ranks.is_first:
        for name, dump in dumps.items():
            np.savez(folder / f"{name}.npz", **{key: value.float().numpy() for key, value in dump.items()})
        (folder / "found.json").write_text(json.dumps(found))
    engine.close()


if __name__ == "__main__":
    main()
