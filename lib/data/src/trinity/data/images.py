"""Images of tasks and environments: read from a row's column, checked, decoded to RGB, placed among tokens.

Images travel as their original files and are identified by digest. Explorer and trainer decode them with `rgb`, so both
give their processor the same pixels.

A policy may sample the placeholder token of images. Only an image's position distinguishes its placeholders from such
tokens.
"""

import base64
import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from trinity.data.image_urls import UrlReader
from trinity.data.tables import DatasetError, Row
from trinity.data.vision import ImageRules
from trinity.runtime.errors import InvalidInput

MARKER = "<image>"  # place of an image in a prompt; without markers, images precede the text
LARGEST_BYTES = 6 * 1024 * 1024  # of one task's images: a task is one message of NATS
LARGEST_PIXELS = 64_000_000
MOST_IMAGES = 128  # of one sequence of tokens
_IMAGE_PARTS = ("image_url", "image")  # types of parts of a message
# Other modes have more than 8 bits a channel, or other colours than red, green and blue.
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")


def digest(image: bytes) -> bytes:
    """sha256 of an image's file, 32 bytes."""
    return hashlib.sha256(image).digest()


@dataclass(frozen=True)
class PlacedImage:
    """An image among tokens: its file, and the position of its first placeholder."""

    start: int
    file: bytes

    @cached_property
    def digest(self) -> bytes:
        return digest(self.file)

    def moved(self, by: int) -> "PlacedImage":
        return replace(self, start=self.start + by)


@lru_cache(maxsize=256)  # it keeps the files
def size(image: bytes) -> tuple[int, int]:
    """(width, height) in pixels, read from the header. Raises InvalidInput for an image that `rgb` refuses."""
    found = _opened(image)
    return int(found.width), int(found.height)


def form(image: bytes) -> str:
    """The file format as a suffix: png, jpeg, ... Raises InvalidInput."""
    return str(_opened(image).format).lower()


def rgb(image: bytes) -> Any:
    """The image as a PIL.Image in RGB, with white for transparency. Raises InvalidInput."""
    from PIL import Image

    found = _opened(image)
    try:
        found.load()
        if found.mode in ("LA", "PA", "RGBA") or "transparency" in found.info:
            layered = found.convert("RGBA")
            whole = Image.new("RGB", layered.size, "white")
            whole.paste(layered, mask=layered.getchannel("A"))
            return whole
        return found.convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise InvalidInput("image", f"cannot be decoded: {error}") from None


def _opened(image: bytes) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise InvalidInput("image", "needs Pillow; `pip install pillow`") from None
    Image.MAX_IMAGE_PIXELS = None  # LARGEST_PIXELS is below it
    try:
        found = Image.open(io.BytesIO(image))
    except (OSError, ValueError, SyntaxError, EOFError):
        raise InvalidInput("image", f"is no image that Pillow reads ({len(image)} bytes)") from None
    if found.width * found.height > LARGEST_PIXELS:
        what = f"is {found.width} x {found.height} pixels; at most {LARGEST_PIXELS:,} pixels are read. Make it smaller"
        raise InvalidInput("image", what)
    if found.mode not in _MODES:
        raise InvalidInput("image", f"has Pillow's mode {found.mode!r}; convert it to one of {', '.join(_MODES)}")
    return found


def of_row(row: Row, key: str, folder: Path, urls: Sequence[str] = ()) -> tuple[bytes, ...]:
    """The images in a row's column, in order. The column has one image, a list of images, or messages with image parts.

    An image is a path, bytes, {bytes, path}, or OpenAI's image part. Paths are relative to `folder`, the dataset's
    folder. `urls` are format.image_urls. Raises DatasetError naming column and file. Images are decoded by `check`, not
    here.
    """
    value = row.get(key)
    if value is None or value == "":
        what = f"{key!r} is missing" if key not in row else f"{key!r} is empty"
        raise DatasetError(f"{what}; it must hold an image (columns: {', '.join(row)})")
    conversation = is_conversation(value)
    found = _of_messages(value, key) if conversation else value if isinstance(value, list | tuple) else [value]
    reader = UrlReader(urls, LARGEST_BYTES)
    images = tuple(_image(item, key, folder, reader) for item in found)
    if not images:
        what = "has no image in its messages" if conversation else "is an empty list"
        raise DatasetError(f"{key!r} {what}; it must hold an image")
    if (total := sum(map(len, images))) > LARGEST_BYTES:
        what = f"holds {total:,} bytes of images; a task takes {LARGEST_BYTES:,}. Make them smaller"
        raise DatasetError(f"{key!r} {what}")
    return images


def with_folder(value: Any, folder: Path) -> Any:
    """A column of images with the paths as they are seen from any folder."""
    if isinstance(value, list | tuple):
        return [with_folder(one, folder) for one in value]
    if isinstance(value, dict) and not isinstance(value.get("bytes"), bytes):
        places = {"path", "image", "image_url", "url", *(["content"] if isinstance(value.get("content"), list) else [])}
        return {name: with_folder(inner, folder) if name in places else inner for name, inner in value.items()}
    is_path = isinstance(value, str) and value and "://" not in value and not value.startswith("data:")
    return str(folder / Path(value).expanduser()) if is_path else value


def is_conversation(value: Any) -> bool:
    """Returns True for a list of messages."""
    return isinstance(value, list | tuple) and any(isinstance(one, dict) and "role" in one for one in value)


def as_text(value: Any, key: str) -> list[Any]:
    """The messages with lists of parts converted to text, in which MARKER stands for an image.

    Raises DatasetError for a value without messages, and for parts other than text and images.
    """
    if not is_conversation(value):
        what = "is the column of the prompt and of its images; it must hold messages, with OpenAI's parts"
        raise DatasetError(f"{key!r} {what}")
    found = []
    for number, message in enumerate(value):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list | tuple):
            message = {**message, "content": "".join(_part_as_text(part, key, number) for part in content)}
        found.append(message)
    return found


def _part_as_text(part: Any, key: str, number: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind not in _IMAGE_PARTS:
        what = f"has a part {part!r:.80} in message {number}; parts are text, {' or '.join(_IMAGE_PARTS)}"
        raise DatasetError(f"{key!r} {what}")
    return MARKER


def _of_messages(value: Any, key: str) -> list[Any]:
    """The image parts of messages, in order. Raises DatasetError as `as_text` does."""
    as_text(value, key)
    contents = [message.get("content") for message in value if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return [part for part in parts if part["type"] in _IMAGE_PARTS]


def _image(value: Any, key: str, folder: Path, urls: UrlReader) -> bytes:
    if isinstance(value, dict):  # an OpenAI part, or what Hugging Face's datasets write to parquet
        inner = value.get("image_url", value.get("bytes") or value.get("path") or value.get("image"))
        return _image(inner.get("url") if isinstance(inner, dict) else inner, key, folder, urls)
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise DatasetError(f"{key!r} holds {value!r:.100}, must be a path, bytes or an image part")
    if value.startswith("data:"):
        try:
            return of_data_url(value)
        except ValueError:
            raise DatasetError(f"{key!r} holds {value:.40}..., which is no base64") from None
    if "://" in value:
        try:
            return urls.read(value)
        except DatasetError as error:
            raise DatasetError(f"{key!r} holds {value:.200}; {error}") from None
    file = folder / Path(value).expanduser()
    try:
        return file.read_bytes()
    except (OSError, ValueError) as error:
        raise DatasetError(f"{key!r}: {str(file)!r} cannot be read: {getattr(error, 'strerror', error)}") from None


def of_data_url(url: str) -> bytes:
    """The file in a URL `data:image/png;base64,...`. Raises ValueError for other characters than base64's."""
    return base64.b64decode(url.partition(";base64,")[2], validate=True)


def check(
    row: Row,
    number: int,
    key: str,
    folder: Path,
    rules: ImageRules | None,
    most_tokens: int,
    urls: Sequence[str] = (),
) -> None:
    """Decode every image of a row. Raises DatasetError naming row and file if they need more than `most_tokens`."""
    try:
        images = of_row(row, key, folder, urls)
        for image in images:
            rgb(image)
        tokens = sum(rules.tokens(*size(image)) for image in images) if rules is not None else 0
    except DatasetError as error:
        raise DatasetError(f"row {number}: {error}") from None
    except InvalidInput as error:
        raise DatasetError(f"row {number}: {key!r}: {_named(row.get(key))}: {error}") from None
    if tokens > most_tokens:
        what = f"takes {tokens} tokens, model.max_prompt_tokens is {most_tokens}; make it smaller, or allow more"
        raise DatasetError(f"row {number}: {key!r}: {_named(row.get(key))} {what}")


def _named(value: Any) -> str:
    """A column's value for messages: its path or its number of bytes."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_named, value))[:200]
    if isinstance(value, dict):
        return str(value.get("path") or "an image part")[:200]
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)[:200]


def parts(prompt: str, count: int) -> list[dict[str, str]]:
    """A prompt with `count` images as parts of a message. Images are at the markers; without markers, before the text.

    Raises InvalidInput if the numbers of markers and images differ.
    """
    pieces = prompt.split(MARKER)
    if len(pieces) == 1:
        return [*({"type": "image"} for _ in range(count)), {"type": "text", "text": prompt}]
    if len(pieces) - 1 != count:
        raise InvalidInput("task.images", f"are {count}, and the prompt has {len(pieces) - 1} times {MARKER}")
    found: list[dict[str, str]] = []
    for index, piece in enumerate(pieces):
        found += ([{"type": "image"}] if index else []) + ([{"type": "text", "text": piece}] if piece else [])
    return found


def observed(text: str, count: int) -> list[dict[str, str]]:
    """Like `parts`, for a text of an environment, which may repeat markers that a policy wrote.

    If the numbers of markers and images differ, markers are plain text and the images precede the text.
    """
    if text.count(MARKER) == count:
        return parts(text, count)
    return [*({"type": "image"} for _ in range(count)), {"type": "text", "text": text}]


def plain(content: Any) -> str:
    """A message's content as text, with MARKER for each image."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else MARKER for part in content)


def expanded(prompt: Sequence[int], images: Sequence[bytes], rules: ImageRules) -> list[int]:
    """The prompt with each image's single placeholder replaced by one placeholder for each of its tokens.

    Raises InvalidInput if the numbers of placeholders and images differ, for example for a placeholder in the text.
    """
    places = sum(token == rules.token for token in prompt)
    if places != len(images):
        what = f"has {places} image placeholders for {len(images)} images; its text may not hold the placeholder token"
        raise InvalidInput("prompt", what)
    left = iter(images)
    counts = ([token] * (rules.tokens(*size(next(left))) if token == rules.token else 1) for token in prompt)
    return [token for run in counts for token in run]


def collapsed(tokens: Sequence[int], images: Iterable[PlacedImage], rules: ImageRules) -> list[int]:
    """Tokens for a processor: one placeholder for each image. Placeholder ids without an image become another token."""
    other = int(rules.token == 0)
    found: list[int] = []
    at = 0
    for image in images:
        found += [other if token == rules.token else token for token in tokens[at : image.start]] + [rules.token]
        at = image.start + rules.tokens(*size(image.file))
    return found + [other if token == rules.token else token for token in tokens[at:]]


def placed(tokens: Sequence[int], images: Sequence[bytes], rules: ImageRules) -> tuple[PlacedImage, ...]:
    """The positions of images among tokens that no policy sampled, such as `expanded` returns.

    Raises InvalidInput for a placeholder without an image.
    """
    found, at = [], 0
    for image in images:
        at = next((index for index in range(at, len(tokens)) if tokens[index] == rules.token), len(tokens))
        found.append(PlacedImage(at, image))
        at += rules.tokens(*size(image))
    check_placeholders("tokens", tokens, found, rules)
    if rules.token in tokens[at:]:
        raise InvalidInput("tokens", f"have more image placeholders than their {len(images)} images take")
    return tuple(found)


def check_placeholders(name: str, tokens: Sequence[int], images: Iterable[PlacedImage], rules: ImageRules) -> None:
    """Raises InvalidInput unless each image has all its placeholders at its position, after the previous image's.

    Other tokens with the placeholder's id belong to the policy or to a text.
    """
    at = 0
    for image in images:
        end = image.start + rules.tokens(*size(image.file))
        if image.start < at or end > len(tokens) or any(token != rules.token for token in tokens[image.start : end]):
            what = f"has no {end - image.start} image placeholders at {image.start}, as its image there takes"
            raise InvalidInput(name, what)
        at = end
