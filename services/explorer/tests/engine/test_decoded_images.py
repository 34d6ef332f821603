"""Images of running conversations are decoded once, as long as there is room for their pixels."""

import pytest

from support.fakes.data.pictures import picture
from trinity.data.images import PlacedImage
from trinity.explorer.engine import images
from trinity.explorer.engine.images import DecodedImages
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core


def test_an_image_is_decoded_once_wherever_it_stands() -> None:
    decoded, file = DecodedImages(), picture(mode="L", colour=7)
    first, again = decoded.of([PlacedImage(3, file), PlacedImage(9, file)])
    assert first is again
    assert (first.mode, first.getpixel((0, 0))) == ("RGB", (7, 7, 7))


def test_those_used_longest_ago_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_KEPT_BYTES", 2 * 3 * 32 * 32)
    decoded = DecodedImages()
    placed = [PlacedImage(0, picture(colour=colour)) for colour in ("red", "green", "blue")]
    red, green = decoded.of(placed[:2])
    assert decoded.of(placed[:1]) == [red]
    decoded.of(placed[2:])
    assert decoded.of(placed[:1])[0] is red
    assert decoded.of(placed[1:2])[0] is not green
    (large,) = decoded.of([PlacedImage(0, picture(100, 100))])
    assert decoded.of([PlacedImage(0, picture(100, 100))])[0] is not large, "it alone is more than is kept"


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(InvalidInput, match="is no image"):
        DecodedImages().of([PlacedImage(0, b"a text")])
