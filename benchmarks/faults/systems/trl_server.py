"""TRL's GRPOTrainer on one GPU, which samples from a vLLM server on another.

The server's command is that of `trl vllm-serve` in TRL 1.16, which prints it as its replacement. TRL names no
supervisor for the server. Ours, `trl_pair.py`, is the plainest.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from systems.base import ROOT, Settings
from systems.trl_system import Trl

URL = "http://127.0.0.1:8000"
_HERE = Path(__file__).parent


class TrlServer(Trl):
    name = "trl-server"
    ahead, parts = 0, frozenset({"engine"})
    recovery = f"{Trl.recovery}; the server, and a killed torchrun, are started again (by trl_pair.py, which is ours)"

    def prepare(self, settings: Settings, folder: Path) -> None:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        if not settings.gpu or len(gpus) < 2:
            raise SystemExit(f"trl-server: needs --gpu and two GPUs, but CUDA_VISIBLE_DEVICES names {len(gpus)}")
        super().prepare(settings, folder)
        trainer = [*super().command(settings, folder), "--server", URL]
        commands = {"server": serve(settings.model), "trainer": trainer}
        common = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": "127.0.0.1"}
        pair = {
            name: {"command": command, "variables": {"CUDA_VISIBLE_DEVICES": gpu, **common}}
            for (name, command), gpu in zip(commands.items(), gpus, strict=False)
        }
        (folder / "pair.json").write_text(json.dumps(pair, indent=1))

    def command(self, settings: Settings, folder: Path) -> Sequence[str]:
        return [sys.executable, str(_HERE / "trl_pair.py"), str(folder / "pair.json")]

    def sampler(self, root: psutil.Process) -> psutil.Process | None:
        found = (one for one in root.children(recursive=True) if "VLLM::EngineCore" in "".join(one.cmdline()))
        return next(found, None)

    def paths(self) -> Sequence[str]:
        return [str(ROOT / "benchmarks/faults/systems/trinity_engine"), *super().paths()]


def serve(model: Path) -> list[str]:
    host, port = URL.removeprefix("http://").split(":")
    return [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", host, "--port", port,
        "--gpu-memory-utilization", "0.3", "--enforce-eager", "--weight-transfer-config", '{"backend": "nccl"}',
        "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1",
    ]  # fmt: skip
