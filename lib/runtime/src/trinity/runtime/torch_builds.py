"""Packages that come along with vLLM and were built for another torch than the one that is installed."""

import importlib.metadata
import sys

_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def hide_unusable_companions() -> None:
    """Make torchvision, torchaudio and torchcodec look absent if they cannot work with this torch.

    vLLM's CPU build requires torch 2.13.0+cpu, and the three in any build. Where the package index has no CPU builds of
    them, pip installs those for CUDA: transformers finds torchvision and fails while it imports it. Text models need
    none of the three. Call this before transformers or vLLM is imported; it imports neither.
    """
    if not _version("torch").endswith("+cpu"):
        return
    for name in _COMPANIONS:
        version = _version(name)
        if version and not version.endswith("+cpu"):
            sys.modules.setdefault(name, None)  # type: ignore[arg-type] # import and find_spec report it as not there


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
