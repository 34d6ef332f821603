"""Ranks on machines with job folders of their own: they train, save to a bucket, and others resume.

python -m support.programs.trainer.apart_ranks JOB.json      (one process per rank, with torchrun's variables)

JOB has the configuration, `folder` and `steps` to train after the newest checkpoint. Each rank has the job folder
`<folder>/machine<rank>` and writes `<folder>/found<rank>.json`; rank 0 also writes weights and states as
`<folder>/state.npz`. While a checkpoint is written, the ranks train another step, whose result must not be in it.
"""

import json
import sys
from pathlib import Path

import numpy as np

from support.programs.trainer.engine_actions import whole_state
from support.programs.trainer.training import fixed_batch


def main() -> None:
    import torch

    from trinity.config import make_plan
    from trinity.config.schema import Config
    from trinity.trainer.engine import TrainEngine
    from trinity.trainer.engine.checkpoint_store import CheckpointStore
    from trinity.trainer.engine.checkpoints import Checkpoints
    from trinity.trainer.process.control import Control
    from trinity.trainer.process.exchange import Exchange
    from trinity.trainer.process.ranks import ranks_from_environment
    from trinity.trainer.process.times import StepTimes

    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    folder, ranks = Path(job["folder"]), ranks_from_environment(1)
    own = {"checkpoint_root_dir": str(folder / f"machine{ranks.rank}")}
    plan = make_plan(Config.model_validate({**job["config"], **own}))
    engine = TrainEngine(plan, ranks, "cpu")
    store, exchange, aside = CheckpointStore.of(plan, "run"), Exchange(ranks), Exchange(ranks)
    checkpoints = Checkpoints(plan, "run", exchange, aside, engine, Control(), store, StepTimes(), None, lambda: 0)
    begin, _ = checkpoints.resume()
    step = begin
    for step in range(begin + 1, begin + 1 + job["steps"]):
        engine.train(fixed_batch(step), 100)
    model = engine._model
    state = {**whole_state(model, masters=True), **whole_state(model, masters=False)}
    if job["steps"]:
        checkpoints.save(step)
        engine.train(fixed_batch(step + 1), 100)
        checkpoints.settle()
    slices = sorted(path.name for path in plan.job_dir.rglob("slices/*"))
    found = {"begin": begin, "apart": store.apart(exchange), "slices": slices, "steps": store.steps()}
    (folder / f"found{ranks.rank}.json").write_text(json.dumps(found))
    if ranks.is_first:
        np.savez(folder / "state.npz", **{key: value.float().numpy() for key, value in state.items()})
    engine.close()


if __name__ == "__main__":
    main()
