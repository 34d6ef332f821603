"""Which Trinity is installed, and which other packages."""

import importlib.metadata


def installed_version(part: str) -> str:
    """Returns the version of a package; for a part such as trinity-buffer that of `trinity` if all are installed."""
    for distribution in ("trinity", part) if part.startswith("trinity-") else (part,):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"unknown: {'neither trinity nor its parts are' if part.startswith('trinity-') else 'it is not'} installed"
