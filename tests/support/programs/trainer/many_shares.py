"""The gradient of one loss at once and in shares, in bfloat16, under each ZeRO stage; its norms come back.

python -m support.programs.trainer.many_shares JOB.json      (one process per rank, with torchrun's variables)
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.programs.trainer.engine_actions import run_module

Norms = dict[str, float]


def norms_of(folder: Path, ranks: int, shares: Sequence[float], seconds: float = 150) -> dict[str, Norms]:
    """By ZeRO stage, of shares that add up to 1: `once`, in `shares`, and so `again` after some were abandoned."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps({"shares": list(shares)}))
    run_module("support.programs.trainer.many_shares", folder / "job.json", ranks, seconds)
    found: dict[str, Norms] = json.loads((folder / "norms.json").read_text())
    return found


class TwoLayers:
    """A model that trains, and an input of it."""

    def __init__(self, zero_stage: int, rank: int) -> None:
        import torch

        from trinity.config.schema.algorithm import OptimizerConfig
        from trinity.config.schema.trainer import TrainerConfig
        from trinity.trainer.engine.deepspeed import DeepSpeedModel

        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 8)).bfloat16()
        self.inputs = torch.randn(4, 24).add(rank).bfloat16()
        trainer = TrainerConfig.model_validate({"deepspeed": {"zero_stage": zero_stage}})
        cpu = torch.device("cpu")
        self.model = DeepSpeedModel(layers, OptimizerConfig(), trainer, torch.bfloat16, cpu, grad_clip=0.5)

    def backward(self, share: float) -> None:
        self.model.backward(self.model(self.inputs).float().square().sum() * share)

    def abandon(self) -> None:
        """Three shares, the last of which runs out of memory when the second layer has its gradient."""
        import torch

        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("out of memory")

        def after_the_layer(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
            output.register_hook(fail)

        for _ in range(2):
            self.backward(0.5)
        hook = self.model.module[1].register_forward_hook(after_the_layer)
        try:
            self.backward(0.5)
        except torch.OutOfMemoryError:
            self.model.abandon()
        else:
            raise AssertionError("memory did not run out")
        hook.remove()

    def norm(self, shares: Sequence[float]) -> float | None:
        for share in shares:
            self.backward(share)
        return self.model.step(1e-9)


def main() -> None:
    import torch

    from trinity.trainer.engine.deepspeed import import_deepspeed
    from trinity.trainer.process.ranks import ranks_from_environment

    torch.set_num_threads(1)
    job, ranks = Path(sys.argv[1]), ranks_from_environment(1)
    shares = [share / ranks.world_size for share in json.loads(job.read_text())["shares"]]
    import_deepspeed(torch.device("cpu")).init_distributed(dist_backend="gloo", verbose=False)
    norms: dict[str, Any] = {}
    for zero in (0, 1, 2, 3):
        found = TwoLayers(zero, ranks.rank)
        norms[str(zero)] = {"once": found.norm([sum(shares)]), "shares": found.norm(shares)}
        found.abandon()
        norms[str(zero)]["again"] = found.norm(shares)
    if ranks.is_first:
        (job.parent / "norms.json").write_text(json.dumps(norms))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
