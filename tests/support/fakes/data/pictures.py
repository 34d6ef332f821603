"""Files of pictures."""

import io

from PIL import Image


def picture(width: int = 32, height: int = 32, mode: str = "RGB", colour: object = 0, form: str = "PNG") -> bytes:
    """The file of an image of one colour."""
    found = io.BytesIO()
    Image.new(mode, (width, height), colour).save(found, form)  # type: ignore[arg-type]
    return found.getvalue()
