"""Runs of the quickstart for benchmarks, in one folder. A run that has ended there is not repeated."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from trinity.runtime.devices import visible_gpus

HERE = Path(__file__).parents[1]
QUICKSTART = HERE / "examples/quickstart/arithmetic.yaml"
_ON_GPUS = (
    "explorer.rollout_model.gpu_memory_utilization=0.05",  # several runs share a GPU
    "explorer.rollout_model.enforce_eager=true",
)

Asked = TypeVar("Asked")
Told = TypeVar("Told")


class Runs:
    def __init__(self, folder: Path, plugin: str = "", at_once: int = 1, data: Sequence[str] = ()) -> None:
        """`plugin`: source of reward functions. `at_once`: runs that share the GPUs, in turn, or else the CPU.

        `data`: options of make_data.py for other data than the quickstart's.
        """
        self.jobs = folder / "jobs/quickstart"
        self._plugins = folder / "plugins"
        self._plugins.mkdir(parents=True, exist_ok=True, mode=0o700)
        if plugin:
            (self._plugins / "of_benchmark.py").write_text(plugin)
        self._at_once, cards = at_once, visible_gpus()
        self._keys = _ON_GPUS if cards else ()
        self._places: SimpleQueue[dict[str, str]] = SimpleQueue()
        for number in range(at_once):
            self._places.put({"CUDA_VISIBLE_DEVICES": cards[number % len(cards)] if cards else ""})
        built = {part: HERE / "build/quickstart" / part for part in ("model", "data")}
        if data:
            built["data"] = folder / "data"
        self._environment = {
            "TRINITY_MODEL_PATH": str(built["model"]),
            "TRINITY_TASKSET_PATH": str(built["data"]),
            **os.environ,
            "TRINITY_CHECKPOINT_ROOT_DIR": str(folder / "jobs"),
            "TRINITY_PLUGIN_DIRS": str(self._plugins),
        }
        for part, variable, options in (("model", "TRINITY_MODEL_PATH", ()), ("data", "TRINITY_TASKSET_PATH", data)):
            if not (path := Path(self._environment[variable])).exists():
                script = f"examples/quickstart/make_{part}.py"
                subprocess.run([sys.executable, script, str(path), *options], check=True, cwd=HERE)

    def each(self, play: Callable[[Asked], Told], over: Iterable[Asked]) -> list[Told]:
        with ThreadPoolExecutor(self._at_once) as threads:
            return list(threads.map(play, over))

    def trinity(self, *arguments: str, fails: bool = False) -> str:
        """Returns what a command prints. `fails`: its exit code may be 1."""
        command = [sys.executable, "-m", "trinity.cli.main", *arguments]
        place = self._places.get()
        try:
            environment = {**self._environment, **place}
            done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
        finally:
            self._places.put(place)
        if done.returncode > fails:
            raise SystemExit(f"trinity {' '.join(arguments)}: {done.stderr[-2000:]}{done.stdout[-2000:]}")
        return done.stdout

    def run(self, name: str, config: Path, *overrides: str) -> Path:
        if not (self.jobs / name / "summary.json").exists():
            print(f"running {name}", file=sys.stderr, flush=True)
            keys = () if config.name == "fork.yaml" else self._keys
            self.trinity("run", "--config", str(config), *overrides, *keys)
        return self.jobs / name

    def derived(self, name: str, *command: str) -> Path:
        if not (self.jobs / name).exists():
            self.trinity(*command, "--name", name)
        return self.run(name, self.jobs / name / "fork.yaml")
