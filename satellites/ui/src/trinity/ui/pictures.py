"""The pictures of samples: files in the job folder, which the trainer names by their sha256.

A run wrote them, so a page gets only media types that browsers draw, and only files with the digest of the name.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

from trinity.reading.errors import RunError

_KINDS = {"png": "png", "jpeg": "jpeg", "gif": "gif", "webp": "webp", "bmp": "bmp", "mpo": "jpeg", "ico": "x-icon"}
_NAME = re.compile(rf"([0-9a-f]{{64}})\.({'|'.join(_KINDS)})")
_FOLDER = "buffer/images"


def names(row: dict[str, Any]) -> list[str]:
    """Returns the names of a sample's pictures that a page can show, in order."""
    kept = row.get("images")
    found = (str(one).removeprefix(f"{_FOLDER}/") for one in (kept if isinstance(kept, list) else ()))
    return [name for name in found if _NAME.fullmatch(name)]


def read(folder: Path | None, name: str) -> tuple[bytes, str]:
    """Returns the file and the media type of a picture. Raises RunError unless the job folder has it complete."""
    match = _NAME.fullmatch(name)
    if match is None or folder is None:
        raise RunError(f"there is no picture {name} here")
    try:
        image = (folder / _FOLDER / name).read_bytes()
    except OSError as error:
        raise RunError(f"the picture {name} cannot be read: {error.strerror}") from None
    if hashlib.sha256(image).hexdigest() != match[1]:
        raise RunError(f"the picture {name} has another sha256 than its name: it was changed")
    return image, f"image/{_KINDS[match[2]]}"
