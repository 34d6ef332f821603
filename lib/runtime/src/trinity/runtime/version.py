"""Which Trinity is installed."""

import importlib.metadata


def installed_version(part: str) -> str:
    """The version of a part, as trinity-buffer: of `trinity`, which holds all parts, or of its own distribution."""
    for distribution in ("trinity", part):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown: neither trinity nor its parts are installed"
