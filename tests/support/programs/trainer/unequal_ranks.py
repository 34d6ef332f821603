"""A rank whose GPU is larger than the other's: `python -m support.programs.trainer.unequal_ranks FOLDER`.

It writes its own choice, and the common choice of both ranks.
"""

import json
import sys
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from support.fakes.models.sized_models import GIB, model_of, plan_of
from trinity.trainer.model.activations import choose
from trinity.trainer.process.ranks import Ranks, ranks_from_environment

MEMORY_GIB = (139, 35)


def main(folder: Path) -> None:
    ranks = ranks_from_environment(2)
    memory, cpu = MEMORY_GIB[ranks.rank] * GIB, torch.device("cpu")
    plan, model = plan_of({"deepspeed": {"zero_stage": 0}}), model_of("1.5B")
    alone = choose(plan, model, Ranks(0, 1, 0), cpu, memory)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    together = choose(plan, model, ranks, cpu, memory)
    (folder / f"{ranks.rank}.json").write_text(json.dumps([astuple(alone), astuple(together)]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
