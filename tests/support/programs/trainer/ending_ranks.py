"""Ranks that save their last checkpoint, which takes a while to reach the disk, and end:

python -m support.programs.trainer.ending_ranks FOLDER      (one process per rank, with torchrun's variables)

Where FOLDER has a file `bad`, step 2 ends the run instead, after a checkpoint of step 1. Each rank writes down which
checkpoints there are when its loop has ended.
"""

import json
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SEAL_SECONDS = 2.0


class Engine:
    zero_stage, lora, policy = 0, None, SimpleNamespace(model=None)
    weights = SimpleNamespace(read=lambda: iter(()))

    def reserve(self) -> list[Any]:
        return []

    def snapshot(self, folder: Path, state: dict[str, Any]) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        return list


def main(folder: Path) -> None:
    import torch.distributed as dist

    from support.programs.trainer.training import BASE
    from trinity.api.buffer.v1 import buffer_pb2 as pb
    from trinity.config import make_plan
    from trinity.config.schema import Config
    from trinity.runtime import files
    from trinity.trainer.data.bad_steps import NotFinite
    from trinity.trainer.data.batch import TrainBatch
    from trinity.trainer.data.client import RawBatch
    from trinity.trainer.data.source import Command, Finish, Train
    from trinity.trainer.engine.checkpoint_store import CheckpointStore
    from trinity.trainer.engine.checkpoints import Checkpoints
    from trinity.trainer.engine.step import StepDone
    from trinity.trainer.loop import TrainLoop
    from trinity.trainer.process.control import Control
    from trinity.trainer.process.exchange import Exchange
    from trinity.trainer.process.ranks import ranks_from_environment
    from trinity.trainer.process.times import StepTimes
    from trinity.trainer.publishing import NoVersions

    ranks, control, store = ranks_from_environment(2), Control(), CheckpointStore(folder)
    is_bad = (folder / "bad").exists()

    class Parts:
        """Steps 1 and 2, then the end; step 2 is the last one, and may be bad."""

        def open(self, step: int) -> None:
            control.update(last_step=2)

        def next(self, step: int) -> Command:
            return Train(RawBatch(pb.LedgerEntry(step=step + 1))) if step < 2 else Finish()

        def train(self, raw: RawBatch) -> StepDone:
            if is_bad and raw.entry.step == 2:
                raise NotFinite("loss", 2)
            return StepDone(raw, TrainBatch(raw.entry.step, ()), {})

    sync = files.sync_tree

    def late(tree: Path) -> None:
        time.sleep(SEAL_SECONDS)
        sync(tree)

    files.sync_tree = late
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model = {**BASE["model"], "model_path": str(folder / "model")}
    own = {"model": model, "checkpoint_root_dir": str(folder), "trainer": {"save_hf_checkpoint": "never"}}
    plan, engine, parts = make_plan(Config.model_validate(BASE | own)), Engine(), Parts()
    checkpoints = Checkpoints(
        plan, "run", Exchange(ranks), Exchange(ranks), engine, control, store, StepTimes(), None, lambda: 0,  # type: ignore[arg-type]
    )  # fmt: skip
    with suppress(NotFinite):
        TrainLoop(control, parts, parts, NoVersions(), checkpoints).run()
    (folder / f"{ranks.rank}.json").write_text(json.dumps([store.steps(), control.progress.state]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
