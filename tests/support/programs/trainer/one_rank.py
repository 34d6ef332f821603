"""The same updates on one rank under ZeRO 2, by DeepSpeed's optimizer and by OneRankUpdate.

python -m support.programs.trainer.one_rank JOB.json      (with torchrun's variables)
"""

import json
import sys
from pathlib import Path
from typing import Any

from support.programs.trainer.engine_actions import run_module

Found = dict[str, dict[str, Any]]
STEPS = 6


def updates(folder: Path, dtype: str, seconds: float = 150) -> Found:
    """By way, and by "short, then deepspeed" and "deepspeed, then short", where a checkpoint passes between the two.

    `norms` of the updates, `weights` after all, `count` that AdamW has; `bad`: the norm of a gradient of NaN.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps({"dtype": dtype}))
    run_module("support.programs.trainer.one_rank", folder / "job.json", 1, seconds)
    found: Found = json.loads((folder / "found.json").read_text())
    return found


def make(way: str, dtype: str) -> Any:
    import torch

    from trinity.config.schema.algorithm import OptimizerConfig
    from trinity.config.schema.trainer import TrainerConfig
    from trinity.trainer.engine import deepspeed, gradients

    gradients._CHUNK = 600  # of 2,676 elements in parameters of up to 1,961
    deepspeed.OneRankUpdate = gradients.OneRankUpdate if way == "short" else lambda *_: None
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(37, 53), torch.nn.Tanh(), torch.nn.Linear(53, 11), torch.nn.Linear(11, 5)
    )
    layers.register_parameter("unused", torch.nn.Parameter(torch.ones(7)))
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.1)
    trainer = TrainerConfig.model_validate({"deepspeed": {"zero_stage": 2, "dtype": dtype}})
    layers, torch_dtype = layers.to(getattr(torch, dtype)), getattr(torch, dtype)
    return deepspeed.DeepSpeedModel(layers, optimizer, trainer, torch_dtype, torch.device("cpu"), grad_clip=0.2)


def play(dtype: str, ways: list[str], folder: Path) -> dict[str, Any]:
    """Half of the steps by the first way, and the others by the last. Between them nothing is to leave a trace."""
    import torch

    model, found = make(ways[0], dtype), {"norms": [], "short": []}
    inputs = torch.randn(2 * STEPS, 8, 37, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))

    def backward(index: int, times: float = 1.0) -> None:
        model.backward(model(inputs[index]).float().square().mean() * times)

    for step in range(STEPS):
        if step == STEPS // 2:
            backward(0, float("nan"))
            found["bad"] = str(model.step(1e-2))
            backward(0, 100.0)
            model.drop()
            backward(0, 100.0)
            model.abandon()
            model.snapshot(folder, {})()
            if len(ways) > 1:
                model = make(ways[1], dtype)
                model.load(folder)
        for index in range(1 + step % 3):
            backward(step + index, 1.0 + index)
        found["norms"].append(model.step(1e-2))
        found["short"].append(model._one_rank is not None)
    [state] = model.optimizer.state.values()
    found["count"] = float(state["step"])
    found["weights"] = torch.cat(
        [parameter.detach().float().flatten() for parameter in model.module.parameters()]
    ).tolist()
    return found


def main() -> None:
    import torch

    from trinity.trainer.engine.deepspeed import import_deepspeed

    torch.set_num_threads(1)
    job = Path(sys.argv[1])
    dtype = json.loads(job.read_text())["dtype"]
    import_deepspeed(torch.device("cpu")).init_distributed(dist_backend="gloo", verbose=False)
    orders = [["deepspeed"], ["short"], ["short", "deepspeed"], ["deepspeed", "short"]]
    found = {", then ".join(ways): play(dtype, ways, job.parent / "-".join(ways)) for ways in orders}
    (job.parent / "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
