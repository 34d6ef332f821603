"""Packs the runs of `trinity ui --demo` from job folders: `python docs/record_demo.py JOB [JOB ...]`.

Each job folder needs its NATS store, which no process may use. `--demo --bundle` writes the first run.
Copies leave out paths of the machine, and keep the log lines that pages show. Small files of tasks travel with them.

The runs of today: examples/quickstart/arithmetic.yaml with buffer.save_token_values, from the model of one SFT stage;
lr-2e-4 with 36 steps of 12 groups, lr-1e-4 with 32 steps of 8 groups.
"""

import asyncio
import base64
import json
import shutil
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trinity.reading.reader import any_buffer, find_job_stage
from trinity.ui.demo import ARCHIVE
from trinity.ui.recorded import record
from trinity.weights.checkpoints import newest_model

_EVENTS = ("explorer.attempt.failed", "buffer.task.dead", "buffer.task.requeued", "sync.version.live",
           "explorer.weights.loaded")  # fmt: skip
_FILES = ("buffer/experience_buffer.jsonl", "monitor/trainer.jsonl", "monitor/explorer.jsonl", "finished.json")
_MOST_ROWS_BYTES = 400_000
_FEW_TOKENS = 5000  # a larger vocabulary is cut to the tokens that the run has
_MOST_BYTES = 1_000_000


def main(jobs: list[Path]) -> None:
    """Replaces the archive."""
    with tempfile.TemporaryDirectory() as made:
        for job in jobs:
            copy(job, Path(made) / "demo" / job.name)
        with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
            for age, job in enumerate([Path("data"), *jobs]):  # pages list the newest folder first
                files = Path(made, "demo", job.name)
                for path in sorted([files, *files.rglob("*")] if files.exists() else []):
                    archive.add(path, path.relative_to(made), recursive=False, filter=partial(_plain, -age))
    size = ARCHIVE.stat().st_size
    print(f"{ARCHIVE}: {size:,} bytes")
    assert size < _MOST_BYTES, "too large for a repository: record fewer steps or groups"


def copy(job: Path, folder: Path) -> None:
    """Copies the live or last stage of a job."""
    stage = find_job_stage(job=job)
    source = stage.folder
    for name in ("log", "buffer", "monitor"):
        (folder / name).mkdir(parents=True)
    for name in _FILES:
        shutil.copyfile(source / name, folder / name)
    shutil.copytree(source / "monitor/devices", folder / "monitor/devices")
    for name in ("version.json", "summary.json"):
        shutil.copyfile(job / name, folder / name)
    (folder / ".lock").touch()
    for path in (source / "log").glob("*.log"):
        lines = [line for line in path.read_text().splitlines(keepends=True) if any(f'"{e}"' in line for e in _EVENTS)]
        if lines:
            (folder / "log" / path.name).write_text("".join(lines))
    config = json.loads((source / "config.json").read_text())
    _copy_rows(config, folder.parent / "data")
    config |= {"project": "demo", "name": job.name, "group": "", "checkpoint_root_dir": "checkpoints"}
    config["model"]["model_path"] = "model"
    (folder / "config.json").write_text(json.dumps(_without_folders(config), indent=1, sort_keys=True) + "\n")
    model = newest_model(source)
    assert model is not None, "the run has no checkpoint with a tokenizer"
    tokenizer = json.loads((model[1] / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(_cut(tokenizer, folder / _FILES[0]), ensure_ascii=False))
    asyncio.run(_record(job, folder))


def _copy_rows(config: dict[str, Any], data: Path) -> None:
    """Writes small tasksets into `data`, and names them in the run's configuration."""
    tasks = config["buffer"]["explorer_input"]
    for taskset in (tasks["taskset"], *tasks["eval_tasksets"]):
        path = Path(taskset["path"])
        files = [one for one in ([path] if path.is_file() else path.rglob("*.jsonl")) if one.is_file()]
        if files and sum(one.stat().st_size for one in files) <= _MOST_ROWS_BYTES:
            data.mkdir(exist_ok=True)
            for one in files:
                shutil.copyfile(one, data / one.name)
        taskset["path"] = f"data/{path.name}" if path.is_file() else "data"


def _without_folders(value: Any) -> Any:
    """Replaces absolute paths by their last name."""
    if isinstance(value, dict):
        return {key: _without_folders(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_folders(one) for one in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def _cut(tokenizer: dict[str, Any], experiences: Path) -> dict[str, Any]:
    """Returns the tokenizer with only the tokens of the run: it decodes them, and encodes no text any more."""
    vocabulary = tokenizer["model"].get("vocab", {})
    if not isinstance(vocabulary, dict) or len(vocabulary) <= _FEW_TOKENS:
        return tokenizer
    used: set[int] = set()
    for line in experiences.read_text().splitlines():
        ids = base64.b64decode(json.loads(line)["arrays"]["token_ids"])
        used.update(np.frombuffer(ids, "<i4").tolist())
    tokenizer["model"] |= {"vocab": {text: index for text, index in vocabulary.items() if index in used}, "merges": []}
    return tokenizer


async def _record(job: Path, folder: Path) -> None:
    async with any_buffer(find_job_stage(job=job)) as reader:
        await record(reader.buffer, folder)


def _plain(time: int, entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leaves out who owns the file, and sets its time to that second of 2020."""
    entry.uid = entry.gid = 0
    entry.mtime = 1577836800 + time
    entry.uname = entry.gname = ""
    entry.mode = 0o755 if entry.isdir() else 0o644
    return entry


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
