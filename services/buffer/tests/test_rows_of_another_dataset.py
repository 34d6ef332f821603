"""A dataset that is shorter than that with which the run began is refused by its key."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trinity.buffer.ledger.offline import OfflineSource
from trinity.config import Config, make_plan
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core


def test_a_row_that_the_dataset_has_no_more_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{i}", "response": "a"}) + "\n" for i in range(3)))
    form = {"prompt_type": "plaintext", "prompt_key": "prompt", "response_key": "response"}
    values = {
        "mode": "train", "model": {"model_path": "m"}, "algorithm": {"algorithm_type": "sft"},
        "buffer": {
            "train_batch_size": 2, "total_steps": 4,
            "trainer_input": {"experience_buffer": {"name": "d", "path": str(path), "format": form}},
        },
    }  # fmt: skip
    context: Any = SimpleNamespace(plan=make_plan(Config.model_validate(values)))
    ledger: Any = None
    source = OfflineSource(context, ledger, context.plan.config.buffer.trainer_input.experience_buffer)
    assert source.part(2) is not None
    with pytest.raises(InvalidInput, match=r"experience_buffer.path: has 3 rows, and the ledger names row 3 of the"):
        source.part(3)
