"""Which Trinity is installed."""

import importlib.metadata


def installed_version(part: str) -> str:
    """Returns the version of a part such as trinity-buffer; that of `trinity` if all parts are installed."""
    for distribution in ("trinity", part):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown: neither trinity nor its parts are installed"
