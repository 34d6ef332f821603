"""Rules by which a vision-language model cuts images into tokens, read from the model's folder.

The language model of a model that has no rules here, or that the run lets read no images, trains on text.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from trinity.config.memory import model_folder
from trinity.runtime.errors import InvalidInput

# Values of model_type with these rules, and whether they read images where the YAML's model.images does not say.
SUPPORTED = {"qwen2_5_vl": True, "qwen3_vl": True, "qwen3_vl_moe": False, "qwen3_5": False, "qwen3_5_moe": False}
_BOTH_WAYS = ("gemma3", "gemma4")  # the tokens of an image attend to each other
_NARROWEST = 200  # greatest ratio of the sides that the processor accepts


@dataclass(frozen=True)
class ImageRules:
    """An image is scaled to patches of `patch` pixels a side. `merge` x `merge` patches are one token, with id `token`.

    The scaled image has between least_pixels and most_pixels pixels.
    """

    token: int
    patch: int
    merge: int
    least_pixels: int
    most_pixels: int

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """(1, rows, columns) of patches of an image of width x height pixels. Raises InvalidInput."""
        if max(width, height) > _NARROWEST * min(width, height):
            what = f"is {width} x {height} pixels, one side more than {_NARROWEST} times the other; cut it"
            raise InvalidInput("image", what)
        side = self.patch * self.merge
        rows, columns = round(height / side) * side, round(width / side) * side
        if rows * columns > self.most_pixels:
            scale = math.sqrt(height * width / self.most_pixels)
            rows = max(side, math.floor(height / scale / side) * side)
            columns = max(side, math.floor(width / scale / side) * side)
        elif rows * columns < self.least_pixels:
            scale = math.sqrt(self.least_pixels / (height * width))
            rows, columns = math.ceil(height * scale / side) * side, math.ceil(width * scale / side) * side
        return 1, rows // self.patch, columns // self.patch

    def tokens(self, width: int, height: int) -> int:
        """Number of tokens of an image of width x height pixels. Raises InvalidInput."""
        _, rows, columns = self.grid(width, height)
        return rows * columns // self.merge**2


def has_tower(model_path: str) -> bool:
    """Returns True if the model's config.json is on this machine and has a vision_config."""
    return "vision_config" in _read(model_path, "config.json")


def reads_images(kind: str, wanted: bool | None) -> bool:
    """Returns True if a model of this model_type, with a vision_config, reads images. wanted: model.images."""
    return kind in SUPPORTED and (SUPPORTED[kind] if wanted is None else wanted)


def why_no_images(model_path: str, wanted: bool | None = None) -> str | None:
    """Returns why tasks cannot show images to a model on this machine; None if they can, or for a model elsewhere.

    wanted: model.images.
    """
    if not (model_folder(model_path) / "config.json").is_file():
        return None
    config = _read(model_path, "config.json")
    kind = str(config.get("model_type"))
    if "vision_config" not in config:
        return f"the model {model_path!r} reads no images"
    if kind not in SUPPORTED:
        why = ", since the tokens of an image attend to each other" if kind in _BOTH_WAYS else ""
        return f"a model of type {kind!r} trains on text only{why}; images are supported for {', '.join(SUPPORTED)}"
    return None if reads_images(kind, wanted) else f"a model of type {kind!r} reads images if model.images is true"


def image_rules(model_path: str, wanted: bool | None = None) -> ImageRules | None:
    """The rules of a model on this machine. Returns None for a model that trains on text, or that is not here.

    wanted: model.images. Raises InvalidInput for missing files.
    """
    config = _read(model_path, "config.json")
    if "vision_config" not in config or not reads_images(str(config.get("model_type")), wanted):
        return None
    processor = _read(model_path, "preprocessor_config.json")
    try:
        size = processor.get("size") or {}
        rules = ImageRules(
            token=int(config["image_token_id"]),
            patch=int(processor["patch_size"]),
            merge=int(processor["merge_size"]),
            least_pixels=int(processor.get("min_pixels") or size["shortest_edge"]),
            most_pixels=int(processor.get("max_pixels") or size["longest_edge"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"has no image processor that can be used (preprocessor_config.json, config.json): {error!r}"
        raise InvalidInput("model.model_path", what) from None
    if min(rules.patch, rules.merge, rules.least_pixels) < 1 or rules.most_pixels < (rules.patch * rules.merge) ** 2:
        raise InvalidInput("model.model_path", f"has an image processor without pixels: {rules}")
    return rules


def _read(model_path: str, name: str) -> dict[str, Any]:
    try:
        found = json.loads((model_folder(model_path) / name).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
