"""A safetensors file whose header describes no tensors is named; nothing that reads it meets it half."""

import json
from pathlib import Path
from typing import Any

import pytest

from trinity.runtime.errors import InvalidInput
from trinity.weights.checkpoints import has_weights, safetensors_header

pytestmark = pytest.mark.core

WHOLE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(file: Path, header: bytes) -> Path:
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    return file


def test_a_whole_one_is_read(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", json.dumps({"a": WHOLE, "__metadata__": {"b": "c"}}).encode())
    assert safetensors_header(file) == {"a": WHOLE}
    assert has_weights(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        None, [0, 8], {}, {"data_offsets": [0, 8]}, {**WHOLE, "dtype": 7}, {**WHOLE, "shape": 2},
        {**WHOLE, "shape": ["2"]}, {**WHOLE, "data_offsets": [0, 8.0]}, {**WHOLE, "data_offsets": ["", 8]},
        {**WHOLE, "data_offsets": [0, 4, 8]}, {**WHOLE, "data_offsets": [-1, 8]}, {**WHOLE, "data_offsets": [9, 8]},
    ],
)  # fmt: skip
def test_what_describes_no_tensor_is_refused(entry: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", json.dumps({"a": entry}).encode())
    with pytest.raises(InvalidInput, match="is no whole safetensors file"):
        safetensors_header(file)
    assert not has_weights(tmp_path)


def test_a_deep_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is no whole safetensors file"):
        safetensors_header(write(tmp_path / "model.safetensors", b"[" * 100_000))
