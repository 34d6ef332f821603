"""One training step, split in many ways by one set of processes; the gradient of each comes back.

python -m support.trainer.splits JOB.json      (one process per rank, with torchrun's variables)
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from support.trainer.engine_actions import run_module
from support.trainer.training import BASE, fixed_batch, of_experiences, recorded

Arrays = dict[str, np.ndarray]


def gradients_of(
    folder: Path, model: Path, ranks: int, cases: Mapping[str, dict[str, Any]], seconds: float = 200
) -> dict[str, Arrays]:
    """Of each case (settings of `trainer`): gradients by parameter, grad_norm before clipping at 0.5, and what was
    recorded of tokens, as `training.recorded`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps({"folder": str(folder), "model": str(model), "cases": cases}))
    run_module("support.trainer.splits", folder / "job.json", ranks, seconds)
    return {name: dict(np.load(folder / f"{index}.npz")) for index, name in enumerate(cases)}


def main() -> None:
    import torch

    from trinity.config import make_plan
    from trinity.config.schema import Config
    from trinity.trainer.engine import TrainEngine
    from trinity.trainer.process.ranks import ranks_from_environment

    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    ranks = ranks_from_environment(1)
    for index, trainer in enumerate(job["cases"].values()):
        config = json.loads(json.dumps(BASE))
        config["model"]["model_path"] = job["model"]
        config["checkpoint_root_dir"] = job["folder"]
        sharding = {"dtype": "float32", "zero_stage": trainer.pop("zero_stage")}
        config["trainer"] |= {**trainer, "deepspeed": sharding}
        engine = TrainEngine(make_plan(Config.model_validate(config)), ranks, "cpu")
        batch, record = of_experiences(fixed_batch(1)), engine.token_record()
        metrics = engine.train(batch, 100, record)
        values = record.values(batch.sequences)
        found = {name: _gradient(engine, parameter) for name, parameter in engine.policy.weights()}
        if ranks.is_first:
            found |= recorded(values)
            np.savez(Path(job["folder"]) / f"{index}.npz", grad_norm=metrics["grad_norm"], **found)
        else:
            assert values == []
    engine.close()


def _gradient(engine: Any, parameter: Any) -> np.ndarray:
    """Adam's mean after one step is 1 - beta of what it was given."""
    from deepspeed.utils import safe_get_full_optimizer_state

    if engine.zero_stage:
        mean = safe_get_full_optimizer_state(parameter, "exp_avg")
    else:
        mean = engine._model.optimizer.state[parameter]["exp_avg"]
    return mean.numpy() / (1 - engine._model.optimizer.param_groups[0]["betas"][0])


if __name__ == "__main__":
    main()
