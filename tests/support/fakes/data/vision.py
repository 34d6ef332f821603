"""The example's vision-language model and pictures, for tests."""

import importlib.util
import json
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.fakes.data.pictures import picture
from trinity.data.images import expanded, placed
from trinity.data.vision import ImageRules
from trinity.trainer.data.batch import TrainBatch

EXAMPLE = Path(__file__).parents[4] / "examples/vision"
KINDS = ("qwen2_5_vl", "qwen3_vl")
ASKED = ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")  # they read images with model.images: true


def pretend_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks find the package, which is no requirement of their tests."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: real("json" if name == "torchvision" else name))


def make_model(folder: Path, kind: str = KINDS[0], *options: str) -> Path:
    """The example's model folder."""
    command = [sys.executable, str(EXAMPLE / "make_model.py"), str(folder), "--type", kind, *options]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    return folder


def make_files(folder: Path, kind: str = KINDS[0]) -> Path:
    """The files of the example's model folder that say how it reads images; no weights."""
    files = runpy.run_path(str(EXAMPLE / "make_model.py"))["processor_files"](kind)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(files))
    config = {"model_type": kind, "vision_config": {}, "image_token_id": 47, "text_config": {"vocab_size": 60}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_pictures(batch: TrainBatch, rules: ImageRules) -> TrainBatch:
    """Images before the prompts of the first, third and fifth sequence, two in the last of them; all tokens are the
    example's."""
    shown = {0: (picture(24, 16, colour="red"),), 2: (picture(16, 16, colour="blue"),)}
    shown[4] = (*shown[0], *shown[2])
    found = []
    for index, sequence in enumerate(batch.sequences):
        images = shown.get(index, ())
        tokens = [int(token) % 40 for token in sequence.token_ids]
        head = expanded([rules.token, 3] * len(images), images, rules)
        start = len(head) + sequence.prompt_length
        tokens = np.array([*head, *tokens], np.int32)
        found.append(replace(sequence, token_ids=tokens, prompt_length=start, images=placed(head, images, rules)))
    return replace(batch, sequences=tuple(found))


def make_tokenizer(folder: Path) -> Path:
    """The files of make_files, with the example's tokenizer."""
    make_files(folder)
    tokenizer = runpy.run_path(str(EXAMPLE / "make_model.py"))["make_tokenizer"]()
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["image_token_id"] = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
