"""Helpers of scripts with whole runs: model and data, `trinity run` in a folder, its results, rows of tables."""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

from support.programs.run import TrinityRun  # noqa: E402

COLUMNS = ("", "found", "limit", "of limit")
_MAKE_SECONDS = 300.0
SHAPES = {
    "0.5B": {"hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "intermediate": 4864, "vocabulary": 151936},
    "1.5B": {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "intermediate": 8960, "vocabulary": 151936},
    "7B": {"hidden": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "intermediate": 18944, "vocabulary": 152064},
}


def parser(document: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--cpu", action="store_true", help="vLLM and DeepSpeed on the CPU, groups over gloo")
    made.add_argument("--tiny", action="store_true", help="a few steps: shows that it runs, measures nothing")
    made.add_argument("--folder", type=Path, help="where everything is made, and stays; else a temporary one")
    return made


@contextlib.contextmanager
def working_folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="trinity-benchmark-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def make_data(folder: Path, test_size: int = 128) -> Path:
    """The quickstart's sums."""
    return _quickstart("make_data.py", folder / "data", "--test-size", str(test_size))


def make_model(folder: Path, size: str, cpu: bool) -> Path:
    """A model with random weights: of a shape, or the quickstart's (`tiny`).

    A separate process makes it, so that the GPU is free afterwards.
    """
    if size == "tiny":
        return _quickstart("make_model.py", folder / size)
    making = get_context("spawn").Process(target=_make, args=(folder / size, size, "cpu" if cpu else "cuda"))
    making.start()
    making.join(_MAKE_SECONDS)
    if making.exitcode != 0:
        making.kill()
        raise RuntimeError(f"the model of shape {size} was not made: exit code {making.exitcode}")
    return folder / size


def _quickstart(script: str, target: Path, *given: str) -> Path:
    command = [sys.executable, str(ROOT / "examples/quickstart" / script), str(target), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_MAKE_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{script}: {done.stderr[-2000:]}")
    return target


def _make(folder: Path, shape: str, device: str) -> None:
    from rollout import make_model

    make_model(folder, argparse.Namespace(device=device, **SHAPES[shape]))


def write_yaml(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def environment(args: argparse.Namespace, gpus: str = "0,1") -> dict[str, str]:
    """Environment of the run: the explorer takes the first GPU, the trainer the second."""
    if args.cpu:
        return {"CUDA_VISIBLE_DEVICES": ""}
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", gpus), "HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def started(run: TrinityRun, *overrides: str) -> Iterator[TrinityRun]:
    """The run, from its beginning. Its processes end with the context, or with a SIGTERM to this process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    shutil.rmtree(run.job, ignore_errors=True)
    try:
        run.start(*overrides)
        yield run
    finally:
        run.end()


def ends_well(run: TrinityRun, seconds: float) -> None:
    """Wait for the end. Raises RuntimeError with the end of the output if the run failed."""
    if code := run.finish(seconds):
        raise RuntimeError(f"trinity run ended with {code}:\n{run.tail()}")


def until_trained(run: TrinityRun, steps: int, seconds: float) -> list[dict[str, Any]]:
    """The trainer's metrics of the first `steps` steps. Raises RuntimeError if the run or the time ends before."""
    try:
        run.until(lambda _: len(trained(run.job)) >= steps, seconds, f"{steps} steps are trained")
    except AssertionError as error:
        if len(trained(run.job)) < steps:  # else it ended between two looks
            raise RuntimeError(str(error)) from error
    return trained(run.job)[:steps]


def lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines of a file. Incomplete lines are skipped."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


def trained(stage: Path) -> list[dict[str, Any]]:
    """The trainer's metrics of each step, in order. A repeated step has its last metrics."""
    by_step = {line["step"]: line for line in lines(stage / "monitor/trainer.jsonl")}
    return [by_step[step] for step in sorted(by_step)]


def events(stage: Path, process: str, *names: str) -> list[dict[str, Any]]:
    """Lines of a process's log with one of these events, and `at`: their Unix time."""
    found = [line for line in lines(stage / f"log/{process}.log") if line.get("event") in names]
    return [{**line, "at": datetime.fromisoformat(line["time"]).timestamp()} for line in found]


def row(what: str, found: str, value: float, limit: float, least: bool = False) -> tuple[str, ...]:
    """A row of COLUMNS with its ratio to the limit: at most, or at `least`."""
    kept = value >= limit if least else value <= limit
    cells = what, found, f"{'>=' if least else '<='} {limit:g}"
    ratio = f"{value / limit:.2f}" if limit else "-"
    return *cells, ratio if kept else f"{ratio} MISSED"


def plain(what: str, found: str) -> tuple[str, ...]:
    """A row of COLUMNS without a limit."""
    return what, found, "", ""
