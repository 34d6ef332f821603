"""One step's effect on the weights: several updates, a critic beside the policy, updates that must be skipped."""

import math

import pytest

from support.programs.trainer.training import make_model
from support.programs.trainer.updates import KERNELS, PASSES, SHARDINGS, Seen, see

pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.timeout(200),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("updates")
    return see(make_model(folder / "model"), folder)


@pytest.mark.parametrize("name", ["several", "critic", "dropout"])
def test_a_resumed_run_is_bitwise_the_same(name: str, seen: Seen) -> None:
    found = seen[name]
    assert found["weights_are_the_same"]
    assert found["metrics_are_the_same"]
    assert all(math.isfinite(value) for step in found["metrics"] for value in step.values())


def test_mini_batches_and_epochs_are_updates_of_their_own(seen: Seen) -> None:
    found = seen["several"]["metrics"]
    assert [step["updates"] for step in found] == [8.0] * 4, "16 sequences in parts of at most 5, twice"
    assert abs(found[0]["ratio"] - 1) > 1e-4, "later updates of a batch leave what it began with"


def test_the_critic_learns_alone_until_it_is_warm(seen: Seen) -> None:
    found = seen["critic"]
    assert not found["first_step_changed_the_policy"]
    assert "pg_loss" not in found["metrics"][0]
    assert found["metrics"][0]["updates"] == 0.0
    assert "pg_loss" in found["metrics"][1]
    assert found["metrics"][1]["updates"] == 2.0, "the policy's, not the critic's"
    assert found["files"] == ["actor", "critic"]
    assert all("critic/grad_norm" in step for step in found["metrics"])


def test_the_critic_learns(seen: Seen) -> None:
    losses = seen["critic_alone"]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("place", ["reference_in_loss", "reference_in_reward"])
def test_a_reference_in_host_memory_says_the_same_and_is_fetched_once_a_step(place: str, seen: Seen) -> None:
    found = seen[place]
    assert found["visits"] == 2, "of two steps, of two updates each"
    assert found["beside"] == [pytest.approx(step, rel=1e-5, abs=1e-7) for step in found["away"]]
    assert found["beside"][1][{"reference_in_loss": "kl_loss", "reference_in_reward": "reward_kl"}[place]] > 0


@pytest.mark.parametrize("name", PASSES)
def test_the_reference_runs_once_over_a_batch_that_is_learnt_from_twice(name: str, seen: Seen) -> None:
    beside, away = (seen[f"passes_{name}"][place] for place in ("beside", "away"))
    assert (beside["sequences"], away["sequences"], beside["metrics"]["updates"]) == (16, 16, 2.0)
    assert beside["metrics"] == away["metrics"]


def test_without_a_token_to_train_nothing_is_updated(seen: Seen) -> None:
    assert seen["nothing"] == {"updates": [0.0, 0.0], "unchanged": True}


def test_a_token_is_recorded_as_the_last_update_saw_it(seen: Seen) -> None:
    found = seen["tokens"]
    assert found["updates"] == 8.0
    assert found["apart"] == 0, "of all passes the last one counts"
    assert found["proximal_apart"] < 1e-5
    assert found["moved"] > 0.01
    assert 0 < found["clipped"][0] < found["clipped"][1]
    assert found["of_the_critic_alone"] == [True] * 16, "the policy was not trained: nothing is known of its tokens"


@pytest.mark.parametrize("sharding", ["_".join(map(str, sharding)) for sharding in SHARDINGS])
@pytest.mark.parametrize(("kind", "what"), [("loss", "loss"), ("gradient", "norm of the gradient")])
def test_an_update_that_is_not_finite_touches_no_weight(kind: str, what: str, sharding: str, seen: Seen) -> None:
    found = seen[f"{kind}_{sharding}"]
    said = "; no single group is the cause, the update was of groups 0, 1, 2, 3 of the batch"
    assert found["problem"] == f"step 2: the {what} is not finite{said}"
    assert found["unchanged"]
    assert 0 < found["then"] < math.inf, "the next batch is learnt from"


@pytest.mark.parametrize("how", [f"{zero}_{recompute}" for zero, recompute in KERNELS])
def test_compiled_kernels_change_nothing(how: str, seen: Seen) -> None:
    found = seen[f"kernels_{how}"]
    assert found["found"] == [pytest.approx(step, rel=1e-3, abs=1e-5) for step in found["expected"]]
