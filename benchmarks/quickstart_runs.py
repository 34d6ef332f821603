"""Runs of the quickstart for benchmarks, in one folder. A run that has ended there is not repeated."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]
QUICKSTART = HERE / "examples/quickstart/arithmetic.yaml"


class Runs:
    def __init__(self, folder: Path, plugin: str = "") -> None:
        """`plugin`: source of reward functions."""
        self.jobs = folder / "jobs/quickstart"
        self._plugins = folder / "plugins"
        self._plugins.mkdir(parents=True, exist_ok=True, mode=0o700)
        if plugin:
            (self._plugins / "of_benchmark.py").write_text(plugin)
        built = HERE / "build/quickstart"
        self._environment = {
            "TRINITY_MODEL_PATH": str(built / "model"),
            "TRINITY_TASKSET_PATH": str(built / "data"),
            **os.environ,
            "TRINITY_CHECKPOINT_ROOT_DIR": str(folder / "jobs"),
            "TRINITY_PLUGIN_DIRS": str(self._plugins),
        }
        for part, variable in (("model", "TRINITY_MODEL_PATH"), ("data", "TRINITY_TASKSET_PATH")):
            if not Path(self._environment[variable]).exists():
                subprocess.run([sys.executable, f"examples/quickstart/make_{part}.py"], check=True, cwd=HERE)

    def trinity(self, *arguments: str, fails: bool = False) -> str:
        """Returns what a command prints. `fails`: its exit code may be 1."""
        command = [sys.executable, "-m", "trinity.cli.main", *arguments]
        done = subprocess.run(command, cwd=HERE, env=self._environment, capture_output=True, text=True)
        if done.returncode > fails:
            raise SystemExit(f"trinity {' '.join(arguments)}: {done.stderr[-2000:]}{done.stdout[-2000:]}")
        return done.stdout

    def run(self, name: str, config: Path, *overrides: str) -> Path:
        if not (self.jobs / name / "summary.json").exists():
            print(f"running {name}", file=sys.stderr, flush=True)
            self.trinity("run", "--config", str(config), *overrides)
        return self.jobs / name

    def derived(self, name: str, *command: str) -> Path:
        if not (self.jobs / name).exists():
            self.trinity(*command, "--name", name)
        return self.run(name, self.jobs / name / "fork.yaml")
