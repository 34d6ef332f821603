"""Found before a torchvision whose operators are not there for this torch: declares them, then imports that one.

The transforms of images need none of the operators, but the package's import names two of them.
"""

import importlib
import sys
from pathlib import Path

import torch

for _name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
_here = str(Path(__file__).parents[1])
_at = sys.path.index(_here)
del sys.path[_at], sys.modules["torchvision"]
try:
    importlib.import_module("torchvision")
finally:
    sys.path.insert(_at, _here)  # children get this path, and look there first
