"""Images of chat completions in sessions, checked as a taskset's are. A service downloads nothing from a client's URL.

The gateway replaces each data: URL by the digest of its file. vLLM's application only places images by them, and the
renderer gives the files to the engine (recording.py).
"""

from collections.abc import Mapping
from typing import Any

from trinity.data.images import LARGEST_BYTES, LARGEST_PIXELS, MOST_IMAGES, digest, of_data_url, rgb, size
from trinity.data.vision import ImageRules
from trinity.explorer.serving.asgi import Refused
from trinity.runtime.errors import InvalidInput


def is_image(part: Mapping[str, Any]) -> bool:
    """Returns True for OpenAI's image part of a chat completion."""
    return part.keys() == {"type", "image_url"} and part["type"] == "image_url"


def without_files(
    body: dict[str, Any], rules: ImageRules, known: Mapping[str, bytes]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns the body with digests for image parts, and the files by digest. Raises Refused for a wrong image.

    known: files of the session's former calls.
    """
    files: dict[str, bytes] = {}
    count = pixels = 0

    def replaced(part: Any, where: str) -> Any:
        nonlocal count, pixels
        if not (isinstance(part, dict) and is_image(part)):
            return part
        file, count = _file(part["image_url"], f"{where}.image_url.url"), count + 1
        name = digest(file).hex()
        try:
            width, height = size(file)
            rules.tokens(width, height)
            pixels += width * height
            if pixels <= LARGEST_PIXELS and name not in known and name not in files:
                rgb(file)
        except InvalidInput as error:
            raise _refused(f"{where}.image_url.url", f"holds an {error}") from None
        files[name] = file
        return {"type": "image_url", "image_url": None, "uuid": name}

    messages = []
    for index, message in enumerate(body["messages"]):
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            parts = enumerate(message["content"])
            content = [replaced(part, f"messages[{index}].content[{number}]") for number, part in parts]
            message = {**message, "content": content}
        messages.append(message)
    if count > MOST_IMAGES:
        raise _refused("messages", f"hold {count} images; a call takes {MOST_IMAGES}, so send fewer")
    if pixels > LARGEST_PIXELS:
        raise _refused("messages", f"hold {pixels:,} pixels; a call takes {LARGEST_PIXELS:,}, so send smaller images")
    if (total := sum(map(len, {**known, **files}.values()))) > LARGEST_BYTES:
        what = f"bring the images of the session to {total:,} bytes; it takes {LARGEST_BYTES:,}, so send smaller ones"
        raise _refused("messages", what)
    return {**body, "messages": messages}, files


def shown(message: Any, files: Mapping[str, bytes]) -> list[bytes]:
    """Returns the files of a message's images, in order."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return [files[part["uuid"]] for part in parts if isinstance(part, dict) and "uuid" in part]


def _file(given: Any, where: str) -> bytes:
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str) or not url.startswith("data:"):
        raise _refused(where, f"is {url!r:.100}, must be data:image/png;base64,...; send the bytes of the file")
    try:
        return of_data_url(url)
    except ValueError:
        raise _refused(where, f"is {url:.40}..., which is no base64; send data:image/png;base64,...") from None


def _refused(where: str, problem: str) -> Refused:
    return Refused(400, "invalid_image", f"{where} {problem}", where)
