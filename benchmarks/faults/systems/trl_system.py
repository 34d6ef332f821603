"""TRL's GRPOTrainer in one process, which samples with transformers on a CPU and with vLLM on a GPU.

torchrun is the supervisor that Hugging Face's and PyTorch's documentation name. `resume_from_checkpoint` restores
weights, optimizer, schedule, random state and the position in the data.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from systems.base import ROOT, Settings

PACKAGES = ("trl==1.16.0", "accelerate==1.15.0")


class Trl:
    name = "trl"
    ahead, parts = 0, frozenset({"turns"})
    recovery = "torchrun --max-restarts 20; resume_from_checkpoint"

    def prepare(self, settings: Settings, folder: Path) -> None:
        if not (self._packages / "trl").is_dir():  # beside, not in, the project's environment
            install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(self._packages)]
            subprocess.run([*install, *PACKAGES], check=True)

    def command(self, settings: Settings, folder: Path) -> Sequence[str]:
        values = {
            "model": settings.model, "data": settings.data, "out": folder / "disk", "steps": settings.steps,
            "tasks": settings.tasks, "group": settings.group, "tokens": settings.tokens,
            "save-every": settings.save_every, "seed": settings.seed, "turns": settings.turns,
        }  # fmt: skip
        arguments = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        script = ROOT / "benchmarks/faults/systems/trl_script.py"
        form = ["--gpu"] if settings.gpu else []
        return [*torchrun, "--max-restarts", "20", str(script), *arguments, *form]

    def beside(self, what: str, folder: Path) -> Sequence[str]:
        raise NotImplementedError(what)

    def sampler(self, root: psutil.Process) -> psutil.Process | None:
        return None

    def paths(self) -> Sequence[str]:
        return [str(self._packages)]

    @property
    def _packages(self) -> Path:
        return ROOT / "build/faults/trl"
