"""Images that an environment showed, decoded with Pillow where it is installed."""

import io
from collections.abc import Sequence

from trinity.sdk.conformance.result import Broken, Skipped
from trinity.sdk.contract import MAX_IMAGES_PIXELS


def decode(images: Sequence[bytes], turn: int) -> None:
    """Those of one answer. Raises Broken for what no client can show, and Skipped without Pillow."""
    try:
        from PIL import Image
    except ImportError:
        raise Skipped("needs Pillow; `pip install pillow`") from None
    pixels = 0
    for index, file in enumerate(images):
        try:
            with Image.open(io.BytesIO(file)) as found:
                pixels += found.width * found.height
                if pixels > MAX_IMAGES_PIXELS:
                    raise Broken(f"images of turn {turn} have {pixels} pixels together, at most {MAX_IMAGES_PIXELS}")
                found.load()
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise Broken(f"images[{index}] of turn {turn} cannot be decoded: {error}") from None
