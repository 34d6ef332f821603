"""Updates of a module whose gradient is exact: the sum of the ranks' whole numbers, whatever the sharding.

python -m support.programs.trainer.optimizer_updates JOB.json      (one process per rank, with torchrun's variables)
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from support.programs.trainer.engine_actions import run_module

STEPS, SAVED = 4, 2
VALUES = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.75, "betas": [0.7, 0.95]}
# A rank of four has the 4,096 elements that 8-bit moments need. Shards begin within matrices.
SHAPES = {"embed": (11, 6), "wide": (129, 131), "tall": (67, 5), "stack": (3, 10, 7), "norm": (9,), "bias": (4, 5)}


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, gradient: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((parameter * gradient[name]).sum() for name, parameter in self.named_parameters())


def gradient(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Of one rank: the sum over ranks is divided by their number, so this must be 1, 2 or 4."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return {name: torch.randint(-8, 9, shape, generator=generator).float() for name, shape in SHAPES.items()}


def updates(folder: Path, kind: str, ranks: int, zero: int, begin: Path | None = None) -> dict[str, Any]:
    """Trains all steps and saves after SAVED; with `begin` the steps after that, from that folder's checkpoint.

    Returns the parameters as flat lists; "refused": the reason why the checkpoint was not loaded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = {"kind": kind, "zero": zero, "begin": begin and str(begin), "shares": 4 // ranks}
    (folder / "job.json").write_text(json.dumps(job))
    run_module("support.programs.trainer.optimizer_updates", folder / "job.json", ranks, 150)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def play(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    from trinity.config.schema.algorithm import OptimizerConfig
    from trinity.config.schema.trainer import TrainerConfig
    from trinity.runtime.errors import InvalidInput
    from trinity.trainer.engine.deepspeed import DeepSpeedModel

    optimizer = OptimizerConfig.model_validate({**VALUES, "optimizer_type": job["kind"]})
    trainer = TrainerConfig.model_validate({"deepspeed": {"zero_stage": job["zero"], "dtype": "float32"}})
    model = DeepSpeedModel(Module(), optimizer, trainer, torch.float32, torch.device("cpu"), grad_clip=0.0)
    rank, first = torch.distributed.get_rank(), 1
    if job["begin"]:
        try:
            first = model.load(Path(job["begin"]))["step"] + 1
        except InvalidInput as error:
            return {"refused": str(error)}
    for step in range(first, STEPS + 1):
        for share in range(job["shares"]):
            model.backward(model(gradient(step, rank * job["shares"] + share)))
        model.step(VALUES["lr"])
        if step == SAVED and not job["begin"]:
            model.snapshot(folder / "saved", {"step": step})()
    parameters = list(model.module.parameters())
    with model.gathered(parameters, None) if job["zero"] == 3 else torch.no_grad():
        return {name: parameter.flatten().tolist() for name, parameter in model.module.named_parameters()}


def main() -> None:
    from trinity.trainer.engine.deepspeed import import_deepspeed

    torch.set_num_threads(1)
    job = Path(sys.argv[1])
    import_deepspeed(torch.device("cpu")).init_distributed(dist_backend="gloo", verbose=False)
    found = play(json.loads(job.read_text()), job.parent)
    if torch.distributed.get_rank() == 0:
        (job.parent / "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
