"""Reads images for the trainer's model: patches by the model's processor, and positions in three dimensions."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from trinity.config.schema.model import ModelConfig
from trinity.data.images import PlacedImage, rgb
from trinity.data.vision import ImageRules, image_rules
from trinity.runtime.errors import InvalidInput
from trinity.trainer.data.batch import TrainSequence

_KEPT_BYTES = 2**30  # processed images; the newest is kept in any case


@dataclass(frozen=True)
class Seen:
    """Images of a micro-batch, each once.

    pixels float32 [patches, values]; grids int64 [images, 3]: time, rows, columns.
    places int64 [M]: positions of image features in the flattened input_ids; rows int64 [M]: indices of these features
    among all, each at least once.
    """

    pixels: torch.Tensor
    grids: torch.Tensor
    places: torch.Tensor
    rows: torch.Tensor

    def to(self, device: torch.device) -> "Seen":
        return Seen(*(getattr(self, field.name).to(device) for field in fields(self)))

    def part(self, start: int, stop: int) -> "Seen | None":
        """Returns the images that have features at positions `start` to `stop`; the new positions begin at 0."""
        own = (self.places >= start) & (self.places < stop)
        if not own.any():
            return None
        patches = self.grids.prod(1)
        tokens = patches * (self.rows.max() + 1) // patches.sum()
        of_feature = torch.arange(len(tokens), device=tokens.device).repeat_interleave(tokens)
        kept = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        kept[of_feature[self.rows[own]]] = True
        before = kept[of_feature].cumsum(0) - 1  # features of kept images before each
        pixels = self.pixels[kept.repeat_interleave(patches)]
        return Seen(pixels, self.grids[kept], self.places[own] - start, before[self.rows[own]])


class ImageReader:
    """Runs the image processor of a model, from the same files that the engine has."""

    def __init__(self, model_path: str, rules: ImageRules) -> None:
        from transformers import AutoImageProcessor

        self.rules = rules
        try:
            self._processor = AutoImageProcessor.from_pretrained(model_path)
        except (OSError, ValueError, ImportError) as error:
            raise InvalidInput("model.model_path", f"has no usable image processor: {error}") from None
        self._kept: OrderedDict[bytes, tuple[torch.Tensor, tuple[int, int, int]]] = OrderedDict()
        self._kept_bytes = 0

    @classmethod
    def of(cls, model: ModelConfig) -> "ImageReader | None":
        """Returns None for a model that reads no images."""
        rules = image_rules(model.model_path, model.images)
        return None if rules is None else cls(model.model_path, rules)

    def positions(self, sequence: TrainSequence) -> np.ndarray:
        """Returns positions of the tokens in time, rows and columns, int64 [3, T].

        A text token advances all three. The tokens of an image have their row and column, and an image advances the
        position by its longer side.
        """
        found = np.empty((3, sequence.length), np.int64)
        at, position = 0, 0
        for (start, length), (_, rows, columns) in zip(self._runs(sequence), self._grids(sequence), strict=True):
            found[:, at:start] = np.arange(position, position + start - at)
            position += start - at
            rows, columns = rows // self.rules.merge, columns // self.rules.merge
            places = np.indices((rows, columns)).reshape(2, length)
            found[:, start : start + length] = position
            found[1:, start : start + length] += places
            at, position = start + length, position + max(rows, columns)
        found[:, at:] = np.arange(position, position + sequence.length - at)
        return found

    def read(self, sequences: Sequence[TrainSequence], starts: Sequence[int]) -> Seen | None:
        """Reads the images of some sequences, whose tokens begin at `starts`; None if they have none."""
        if not any(sequence.images for sequence in sequences):
            return None
        read: dict[bytes, tuple[torch.Tensor, tuple[int, int, int]]] = {}
        first: dict[bytes, int] = {}  # index of an image's first feature among all
        places, rows, features = [], [], 0
        for sequence, begin in zip(sequences, starts, strict=True):
            for image, (start, length) in zip(sequence.images, self._runs(sequence), strict=True):
                key = image.digest
                if key not in read:
                    read[key], first[key] = self._one(image), features
                    features += length
                places.append(np.arange(int(begin) + start, int(begin) + start + length))
                rows.append(np.arange(first[key], first[key] + length))
        return Seen(
            torch.cat([pixels for pixels, _ in read.values()]),
            torch.tensor([grid for _, grid in read.values()], dtype=torch.int64),
            torch.from_numpy(np.concatenate(places)),
            torch.from_numpy(np.concatenate(rows)),
        )

    def _runs(self, sequence: TrainSequence) -> list[tuple[int, int]]:
        """Returns (first position, length) of each image's placeholders."""
        lengths = [rows * columns // self.rules.merge**2 for _, rows, columns in self._grids(sequence)]
        return [(image.start, length) for image, length in zip(sequence.images, lengths, strict=True)]

    def _grids(self, sequence: TrainSequence) -> list[tuple[int, int, int]]:
        return [self._one(image)[1] for image in sequence.images]

    def _one(self, image: PlacedImage) -> tuple[torch.Tensor, tuple[int, int, int]]:
        key = image.digest
        if key not in self._kept:
            found: Any = self._processor(images=[rgb(image.file)], return_tensors="pt")
            rows = found["image_grid_thw"][0].tolist()
            self._kept[key] = found["pixel_values"].float(), (rows[0], rows[1], rows[2])
            self._kept_bytes += self._kept[key][0].nbytes
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1][0].nbytes
        self._kept.move_to_end(key)
        return self._kept[key]
