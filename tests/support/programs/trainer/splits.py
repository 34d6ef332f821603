"""One training step, split in many ways by one set of processes; the gradient of each comes back.

python -m support.programs.trainer.splits JOB.json      (one process per rank, with torchrun's variables)
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from support.fakes.data.vision import with_pictures
from support.programs.trainer.engine_actions import run_module
from support.programs.trainer.training import BASE, fixed_batch, of_experiences, recorded

Arrays = dict[str, np.ndarray]


def gradients_of(
    folder: Path,
    model: Path,
    ranks: int,
    cases: Mapping[str, dict[str, Any]],
    seconds: float = 200,
    pictures: bool = False,
    changes: dict[str, dict[str, Any]] | None = None,
    trees: bool = False,
) -> dict[str, Arrays]:
    """For each case (settings of `trainer`): gradients by parameter, grad_norm before clipping at 0.5, and the
    recorded tokens, as in `training.recorded`.

    pictures: the model is the vision example's, and a few of the sequences have images. changes: keys of other sections
    of the configuration. trees: as fixed_batch. A critic's names begin with `critic.`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = {"folder": str(folder), "model": str(model), "cases": cases, "pictures": pictures, "trees": trees}
    (folder / "job.json").write_text(json.dumps({**job, "changes": changes or {}}))
    run_module("support.programs.trainer.splits", folder / "job.json", ranks, seconds)
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
        config["model"] |= {"model_path": job["model"], "images": job["pictures"] or None}
        for section, keys in job["changes"].items():
            config[section] |= keys
        config["checkpoint_root_dir"] = job["folder"]
        sharding = {"dtype": "float32", "zero_stage": trainer.pop("zero_stage")}
        config["trainer"] |= {**trainer, "deepspeed": sharding}
        engine = TrainEngine(make_plan(Config.model_validate(config)), ranks, "cpu")
        batch, record = of_experiences(fixed_batch(1, trees=job["trees"])), engine.token_record()
        if job["pictures"]:
            assert engine.image_rules is not None
            batch = with_pictures(batch, engine.image_rules)
        metrics = engine.train(batch, 100, record)
        values = record.values(batch.sequences)
        found = _gradients(engine._model, "")
        if engine._critic is not None:
            found |= _gradients(engine._critic.model, "critic.")
        if ranks.is_first:
            found |= recorded(values)
            np.savez(Path(job["folder"]) / f"{index}.npz", grad_norm=metrics["grad_norm"], **found)
        else:
            assert values == []
    engine.close()


def _gradients(model: Any, prefix: str) -> Arrays:
    """Gradients of the trained weights."""
    learning = [(name, weight) for name, weight in model.module.weights() if weight.requires_grad]
    return {f"{prefix}{name}": _gradient(model, weight) for name, weight in learning}


def _gradient(model: Any, parameter: Any) -> np.ndarray:
    """Adam's mean after one step is 1 - beta of what it was given."""
    from deepspeed.utils import safe_get_full_optimizer_state

    if model.zero_stage:
        mean = safe_get_full_optimizer_state(parameter, "exp_avg")
    else:
        mean = model.optimizer.state[parameter]["exp_avg"]
    return mean.numpy() / (1 - model.optimizer.param_groups[0]["betas"][0])


if __name__ == "__main__":
    main()
