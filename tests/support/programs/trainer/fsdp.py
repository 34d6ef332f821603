"""The shards that FSDP saves of a model, by as many ranks as its mesh has.

python -m support.programs.trainer.fsdp JOB.json      (one process per rank, with torchrun's variables)
"""

import json
import sys
from pathlib import Path


def main() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from transformers import Qwen2ForCausalLM

    job = json.loads(Path(sys.argv[1]).read_text())
    shape, dim = tuple(int(size) for size in job["mesh"].split("x")), int(job["dim"])

    def place(parameter: torch.nn.Parameter) -> Shard:
        return Shard(dim if parameter.ndim > dim else 0)

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
    model = Qwen2ForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, shard_placement_fn=place)
    fully_shard(model, mesh=mesh, shard_placement_fn=place)
    file = f"model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    torch.save(model.state_dict(), Path(job["actor"]) / file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
