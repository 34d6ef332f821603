"""Checkpoints in the job folder: complete or absent.

<job>/global_step_<n>/
    actor/deepspeed/        model and optimizer shards of every rank
    actor/huggingface/      config and tokenizer; model.safetensors if the weights were asked for
    critic/deepspeed/       of ppo: the same of the critic
    trainer_state.json      step, run, world size, tokens trained
    .full_checkpoint        written last, before the folder gets its name
<job>/trainer_meta.json     the newest one's trainer_state.json
<job>/latest_checkpointed_iteration.txt
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from trinity.runtime import files
from trinity.weights.checkpoints import COMPLETE, checkpoint_folder, complete_steps

_STATE = "trainer_state.json"


@dataclass(frozen=True)
class TrainerState:
    """The state of a resumed trainer beside the tensors. `step` is also the position in the ledger.

    `rollback` is the number of the newest rollback applied to the weights; 0: none.
    """

    run: str
    step: int
    tokens_trained: int
    world_size: int
    zero_stage: int
    rollback: int = 0


class CheckpointStore:
    """All checkpoints of one job."""

    def __init__(self, job_dir: Path) -> None:
        self.job_dir = job_dir

    def path(self, step: int) -> Path:
        return checkpoint_folder(self.job_dir, step)

    def temporary(self, step: int) -> Path:
        """The folder into which all ranks write before `finish`."""
        return self.job_dir / f".global_step_{step}.partial"

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        return complete_steps(self.job_dir)

    def newest(self) -> TrainerState | None:
        """State of the newest complete checkpoint."""
        states = (self.state(step) for step in reversed(self.steps()))
        return next((state for state in states if state is not None), None)

    def state(self, step: int) -> TrainerState | None:
        """State of one checkpoint."""
        state = files.read_json(self.path(step) / _STATE)
        return TrainerState(**state) if isinstance(state, dict) else None

    def begin(self, step: int) -> Path:
        """An empty folder to write into; remains of a crash are removed."""
        folder = self.temporary(step)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "actor").mkdir(parents=True)
        return folder

    def finish(self, state: TrainerState, keep: int | None) -> int:
        """Turn the written folder into the step's durable checkpoint; returns the oldest step that is kept."""
        folder, final = self.temporary(state.step), self.path(state.step)
        files.write_json(folder / _STATE, asdict(state))
        files.sync_tree(folder)
        (folder / COMPLETE).touch()
        files.sync_folder(folder)
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
        files.write_json(self.job_dir / "trainer_meta.json", {"latest_iteration": state.step, **asdict(state)})
        files.write_atomic(self.job_dir / "latest_checkpointed_iteration.txt", str(state.step).encode())
        kept = self.steps()
        for step in kept[: -keep if keep else 0]:
            shutil.rmtree(self.path(step), ignore_errors=True)
        return self.steps()[0]
