"""Out of memory in a step: one retry in halves, with the same result; and the error if it fails."""

import pytest

from support.programs.trainer.training import make_model
from support.programs.trainer.updates import Seen, see

pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.timeout(200),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("memory")
    return see(make_model(folder / "model"), folder, "memory")


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_memory_that_runs_out_once_makes_smaller_micro_batches_and_nothing_else(
    zero: int, place: str, seen: Seen
) -> None:
    found = seen[f"{zero}_{place}"]
    assert found["problem"] == ""
    assert found["found"] == pytest.approx(found["expected"], rel=1e-3, abs=1e-5)
    again = found["rows"][2:]
    assert max(again) < max(found["rows"][:2])
    assert not found["unchanged"]
    assert found["tokens_apart"] < 1e-5
    assert found["apart"] < 1e-5, "a step of the optimizer moves weights by 1e-2"
    assert found["then"][1] == pytest.approx(found["then"][0], rel=1e-4), "nothing of the first try is left"


def test_memory_that_is_not_enough_for_half_either_names_the_batch(seen: Seen) -> None:
    found = seen["for_ever"]
    assert found["problem"].startswith("step 1: memory is not enough for 16 sequences, the longest of 19 tokens")
    assert "a micro-batch of " in found["problem"]
    assert "max_token_len_per_gpu" in found["problem"]
    assert found["unchanged"]
    assert found["then"][1] == pytest.approx(found["then"][0], rel=1e-4), "nothing of it is left for the next step"


def test_log_probabilities_before_a_step_are_computed_in_halves_too(seen: Seen) -> None:
    found = seen["looking_1"]
    assert found["problem"] == ""
    assert found["found"] == pytest.approx(found["expected"], rel=1e-3, abs=1e-5)
    assert seen["looking_2"]["problem"].startswith("step 1: memory is not enough for 16 sequences")
