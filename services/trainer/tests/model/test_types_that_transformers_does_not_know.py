"""A checkpoint newer than transformers is refused in one sentence, with the fix."""

import json
from pathlib import Path

import pytest
import torch

from trinity.config.schema.model import ModelConfig
from trinity.runtime.errors import InvalidInput
from trinity.trainer.model.policy import load_policy

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("more", "trusts", "said"),
    [
        ({}, False, r"a newer one may \(pip install -U transformers\), or choose another model$"),
        ({"auto_map": {"AutoConfig": "own.Config"}}, False, "model.trust_remote_code: true runs the code that"),
        ({"auto_map": {"AutoConfig": "own.Config"}}, True, r"a newer one may"),
    ],
)
def test_the_error_names_the_type_and_the_fix(tmp_path: Path, more: dict[str, object], trusts: bool, said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k9", **more}))
    config = ModelConfig(model_path=str(tmp_path), trust_remote_code=trusts)
    known = rf"model_path: '{tmp_path}' cannot be loaded: transformers \S+ does not know its model_type 'kimi_k9'; "
    with pytest.raises(InvalidInput, match=known + said):
        load_policy(config, torch.float32, 64, weights=False)
