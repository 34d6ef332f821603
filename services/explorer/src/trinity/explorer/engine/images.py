"""Decoded images of running conversations."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from trinity.data.images import PlacedImage, rgb

_KEPT_BYTES = 256 * 2**20  # of decoded images


class DecodedImages:
    """Keeps the latest images of running conversations, since each turn shows vLLM all of them. For any thread."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Any] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def of(self, images: Sequence[PlacedImage]) -> list[Any]:
        """Each image as PIL.Image in RGB. Raises InvalidInput if a file is not an image."""
        return [self._one(image) for image in images]

    def _one(self, image: PlacedImage) -> Any:
        with self._lock:
            if image.digest in self._kept:
                self._kept.move_to_end(image.digest)
                return self._kept[image.digest]
        decoded = rgb(image.file)
        with self._lock:
            if image.digest not in self._kept:
                self._kept[image.digest] = decoded
                self._bytes += _size(decoded)
            while self._bytes > _KEPT_BYTES:
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= _size(oldest)
        return decoded


def _size(decoded: Any) -> int:
    return 3 * int(decoded.width) * int(decoded.height)
