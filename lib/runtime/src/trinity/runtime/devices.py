"""Finds this machine's GPUs and the build of torch, without importing torch or touching a GPU.

nvidia-smi lists the GPUs; CUDA_VISIBLE_DEVICES limits them.
"""

import importlib.util
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_QUERY = "index,uuid,name,memory.total,memory.free,driver_version"
# The oldest driver for each major version of CUDA: https://docs.nvidia.com/deploy/cuda-compatibility
_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}


@dataclass(frozen=True)
class Gpu:
    """`index` is what CUDA_VISIBLE_DEVICES calls it."""

    index: str
    name: str
    total_gib: float
    free_gib: float
    driver: str

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, {self.total_gib:.1f} GiB)"


@dataclass(frozen=True)
class TorchBuild:
    """`cuda`: the version that torch was built for; empty for a CPU build."""

    version: str
    cuda: str


def detect_gpus(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """The GPUs that this process may use, in its order. Empty without an NVIDIA driver."""
    return visible(_nvidia_smi(_QUERY, "nounits"), environment.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus() -> list[str]:
    """Indices of the GPUs that this process may use, MIG slices included. Empty on a machine without GPUs."""
    limited = os.environ.get("CUDA_VISIBLE_DEVICES")
    if limited is not None:  # a GPU that is named twice counts once
        return list(dict.fromkeys(card.strip() for card in limited.split(",") if card.strip() not in ("", "-1")))
    return _nvidia_smi("index").split()


def _nvidia_smi(query: str, *formats: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={query}", f"--format={','.join(('csv', 'noheader', *formats))}"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return listing.stdout if listing.returncode == 0 else ""


def visible(listing: str, limited: str | None) -> list[Gpu]:
    """The GPUs in nvidia-smi's lines that CUDA_VISIBLE_DEVICES names by index or by the beginning of their uuid."""
    found: list[tuple[str, Gpu]] = []
    for line in listing.splitlines():
        index, uuid, name, total, free, driver = (cell.strip() for cell in line.split(","))
        if total.isdigit() and free.isdigit():
            found.append((uuid, Gpu(index, name, int(total) / 1024, int(free) / 1024, driver)))
    if limited is None:
        return [gpu for _, gpu in found]
    named = [name.strip() for name in limited.split(",") if name.strip()]
    matching = (
        gpu for name in named for uuid, gpu in found if name == gpu.index or (len(name) > 4 and uuid.startswith(name))
    )
    return list(dict.fromkeys(matching))  # a GPU that is named twice counts once


def torch_build() -> TorchBuild | None:
    """The build of the installed torch, read from its version.py without an import; None without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    found = {name: re.search(rf"^{name}\b[^=\n]*= *'([^']*)'", text, re.MULTILINE) for name in ("__version__", "cuda")}
    version, cuda = found["__version__"], found["cuda"]
    return TorchBuild(version[1] if version else "", cuda[1] if cuda else "")


def mismatch(gpus: Sequence[Gpu], torch: TorchBuild | None) -> str:
    """The reason why torch cannot use the GPUs, with the fix; empty if it can."""
    if not gpus or torch is None:
        return ""
    here = f"this machine has {len(gpus)} GPU(s) ({gpus[0].name}, driver {gpus[0].driver})"
    otherwise = "or set CUDA_VISIBLE_DEVICES to nothing, to run on the CPU"
    if not torch.cuda:
        return (
            f"torch {torch.version} is built without CUDA, and {here}; install a build of torch with CUDA, {otherwise}"
        )
    major, driver = int(torch.cuda.split(".")[0]), int(gpus[0].driver.split(".")[0] or 0)
    oldest = _OLDEST_DRIVERS.get(major, 0)
    if driver and driver < oldest:
        fits = [cuda for cuda, least in _OLDEST_DRIVERS.items() if least <= driver]
        older = f", a build of torch for CUDA {max(fits)}" if fits else ""
        return (
            f"torch {torch.version} is built for CUDA {torch.cuda}, which needs driver {oldest} or newer, and {here}; "
            f"install a newer driver{older}, {otherwise}"
        )
    return ""


def choose(asked: str, field: str, available: bool) -> str:
    """Returns "cpu" or "cuda" for a service whose setting `field` is `asked` (auto, cpu, cuda).

    `available`: torch.cuda.is_available(). Raises InvalidInput for requested or present GPUs that torch
    cannot use: no GPU is ignored in silence.
    """
    from trinity.runtime.errors import InvalidInput  # loads gRPC, which readers of a YAML do without

    gpus = [] if available or asked == "cpu" else detect_gpus()
    if asked == "cpu" or (asked == "auto" and not available and not gpus):
        return "cpu"
    if available:
        return "cuda"
    why = mismatch(gpus, torch_build())
    if not why and gpus:
        why = (
            f"torch finds none of the {len(gpus)} GPU(s) that nvidia-smi lists; see `python -m torch.utils.collect_env`"
        )
    why = why or "this machine shows no GPU (nvidia-smi finds none, or CUDA_VISIBLE_DEVICES hides them)"
    raise InvalidInput(field, f"is {asked}, but {why}; or set {field}=cpu")


def host_memory() -> float:
    """Free host memory in GiB; 0 if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0.0
    found = next((line for line in lines if line.startswith("MemAvailable")), "MemAvailable: 0")
    return int(found.split()[1]) / 2**20
