"""Hides packages that vLLM installs and that were built for another torch than the installed one."""

import importlib.metadata
import os
import sys
from pathlib import Path

_HIDDEN = ("torchaudio", "torchcodec")
_WITHOUT_OPERATORS = str(Path(__file__).parent / "without_operators")


def hide_unusable_companions() -> None:
    """Makes torchaudio and torchcodec look absent if they cannot work with this torch, and torchvision usable.

    vLLM's CPU build requires torch 2.13.0+cpu, and the three in any build. Where the package index has no CPU builds of
    them, pip installs those for CUDA: transformers finds torchvision and fails while it imports it. Its image
    transforms need nothing of the build, so this process and its children find a package before it that lets it be
    imported. Call this before transformers or vLLM is imported; it imports neither.

    This library has it, because the trainer's ranks, every service and the examples call it, and may not import the
    explorer.
    """
    if not _version("torch").endswith("+cpu"):
        return
    for name in _HIDDEN:
        if _is_for_another(name):
            sys.modules.setdefault(name, None)  # type: ignore[arg-type] # import and find_spec report it as not there
    if _is_for_another("torchvision") and _WITHOUT_OPERATORS not in sys.path:
        sys.path.insert(0, _WITHOUT_OPERATORS)
        others = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = f"{_WITHOUT_OPERATORS}{os.pathsep}{others}" if others else _WITHOUT_OPERATORS


def _is_for_another(name: str) -> bool:
    version = _version(name)
    return bool(version) and not version.endswith("+cpu")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
