"""vLLM samples a family's model and loads a version of its language model; log-probabilities are the trainer's."""

from pathlib import Path

import pytest
from models.engines import differences_of
from models.families import FAMILIES, Family

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(400)]

# vLLM's kernels for CPUs know only some widths.
SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "attention_chunk_size": 128, "mamba_d_head": 32,
    "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip


SAMPLED = [family for family in FAMILIES if family.engine is True]


@pytest.mark.parametrize("family", [pytest.param(family, id=family.kind) for family in SAMPLED])
async def test_an_engine_loads_a_version_of_the_language_model(family: Family, tmp_path: Path) -> None:
    found = await differences_of(family, tmp_path, SIZES, "cpu")
    close = 0.25 if "linear_key_head_dim" in family.text else 2e-5  # delta networks compute in bfloat16
    assert max(found.before, found.after) < close
    assert found.stale > 3 * close  # else a version that is not loaded would pass
