"""Two ranks of the trainer's engine, started as by `trinity run`, write down where they listen, and what they answer.

python -m support.programs.trainer.listening_ranks FOLDER MODEL
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from support.checks.listeners import listeners
from support.programs.trainer.training import BASE


def main(folder: Path, model: str) -> int:
    import torch.distributed as dist

    from trinity.config import make_plan
    from trinity.config.schema import Config
    from trinity.trainer.engine import TrainEngine
    from trinity.trainer.process.ranks import ranks_from_environment

    ranks = ranks_from_environment(2)
    other = os.fork()
    if not other:
        os.environ.update(RANK="1", LOCAL_RANK="1")
        ranks = ranks_from_environment(2)
    config = {**BASE, "model": {**BASE["model"], "model_path": model}, "checkpoint_root_dir": str(folder)}
    engine = TrainEngine(make_plan(Config.model_validate(config)), ranks, "cpu")
    (folder / f"{ranks.rank}.json").write_text(json.dumps(sorted(listeners(os.getpid()))))
    if other:
        from support.checks.port_scan import ports_of, scan

        answers = asyncio.run(scan(ports_of({"0": os.getpid(), "1": other}), {}))
        mode = Path(os.environ["TRINITY_RANKS_FILE"]).parent.stat().st_mode
        (folder / "strangers.json").write_text(json.dumps({"kinds": sorted(set(answers.values())), "mode": mode}))
    dist.barrier()  # the group works after strangers spoke to it
    engine.close()
    if not other:
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
