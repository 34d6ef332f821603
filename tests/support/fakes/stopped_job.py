"""The folder of a job that does not live."""

import json
from pathlib import Path
from typing import Any


def stopped_job(root: Path, *stages: str, steps: int = 0, checkpoints: tuple[int, ...] = (), **note: Any) -> Path:
    """Makes the job p/n below the folder of all runs; returns its folder. `note`: of each step, with its ranks."""
    job = root / "p/n"
    for stage in stages or ("",):
        values = {
            "project": "p",
            "name": f"n/{stage}" if stage else "n",
            "checkpoint_root_dir": str(root),
            "model": {"model_path": "none", "max_prompt_tokens": 8, "max_response_tokens": 8},
            "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
            "buffer": {
                "batch_size": 2,
                "total_steps": 9,
                "explorer_input": {"taskset": {"name": "t", "path": "d"}},
            },
        }
        folder = job / stage
        (folder / "log").mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(values))
        (folder / "monitor").mkdir()
        notes = [{"step": step, "ranks": 1, "device": "cpu", "threads": 2, **note} for step in range(1, steps + 1)]
        if notes:
            (folder / "monitor/batches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in notes))
        for step in checkpoints:
            (folder / f"global_step_{step}").mkdir()
            (folder / f"global_step_{step}/.full_checkpoint").touch()
            (folder / f"global_step_{step}/trainer_state.json").write_text('{"world_size": 1}')
    return job
