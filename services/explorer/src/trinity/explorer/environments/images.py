"""Images of an environment's answer, looked at before a workflow gets them."""

from collections.abc import Sequence

from trinity.data.images import rgb, size
from trinity.data.vision import ImageRules
from trinity.runtime.errors import InvalidInput
from trinity.sdk.contract import MAX_EPISODE_IMAGES_BYTES, MAX_IMAGES_PIXELS


def image_problem(images: Sequence[bytes], rules: ImageRules, of_episode: int) -> str:
    """Why the model cannot see them, as a sentence; empty if it can. Decodes them: for a thread.

    `of_episode`: bytes of all images of the episode, with these.
    """
    if of_episode > MAX_EPISODE_IMAGES_BYTES:
        return f"the images of its episode have {of_episode} bytes, at most {MAX_EPISODE_IMAGES_BYTES}"
    pixels = 0
    for index, image in enumerate(images):
        try:
            width, height = size(image)
            pixels += width * height
            if pixels > MAX_IMAGES_PIXELS:
                return f"its images have {pixels} pixels together, at most {MAX_IMAGES_PIXELS}"
            rules.grid(width, height)
            rgb(image)
        except InvalidInput as error:
            return f"its images[{index}] {str(error).partition(': ')[2]}"
    return ""
