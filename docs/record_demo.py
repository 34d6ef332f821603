"""Copies the run of `trinity ui --demo` from a job folder: `python docs/record_demo.py JOB`.

The folder needs its NATS store, and no process may use it. The copy leaves out paths of the machine, and keeps the log
lines that pages show.

Tests of the pages expect this run: 8 steps of 4 groups, one step ahead. While the trainer pauses before step 1,
rows 2 and 6 cannot be scored, and row 2 is retried. At step 4 the explorer is killed.
"""

import asyncio
import json
import shutil
import sys
from pathlib import Path

from trinity.reading.reader import any_buffer, find_job_stage
from trinity.ui.recorded import DEMO, record
from trinity.weights.checkpoints import newest_model

_EVENTS = ("explorer.attempt.failed", "buffer.task.dead", "buffer.task.requeued", "sync.version.live",
           "explorer.weights.loaded")  # fmt: skip
_FILES = ("buffer/experience_buffer.jsonl", "monitor/trainer.jsonl", "monitor/explorer.jsonl", "finished.json")


def main(job: Path) -> None:
    """Replaces the demo's folder."""
    folder = DEMO / "quickstart"
    shutil.rmtree(DEMO, ignore_errors=True)
    for name in ("log", "buffer", "monitor"):
        (folder / name).mkdir(parents=True)
    for name in _FILES:
        shutil.copyfile(job / name, folder / name)
    shutil.copytree(job / "monitor/devices", folder / "monitor/devices")
    for path in (job / "log").glob("*.log"):
        lines = [line for line in path.read_text().splitlines(keepends=True) if any(f'"{e}"' in line for e in _EVENTS)]
        if lines:
            (folder / "log" / path.name).write_text("".join(lines))
    text = (job / "config.json").read_text()
    config = json.loads(text)
    config["model"]["model_path"] = "model"
    config["checkpoint_root_dir"] = "checkpoints"
    tasks = config["buffer"]["explorer_input"]
    for taskset in (tasks["taskset"], *tasks["eval_tasksets"]):
        taskset["path"] = "data"
    config |= {"project": "demo", "name": "quickstart", "group": ""}
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    model = newest_model(job)
    assert model is not None, "the run has no checkpoint with a tokenizer"
    shutil.copyfile(model[1] / "tokenizer.json", folder / "tokenizer.json")
    asyncio.run(_record(job, folder))


async def _record(job: Path, folder: Path) -> None:
    async with any_buffer(find_job_stage(job=job)) as reader:
        await record(reader.buffer, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
