"""Ratings of versions from their games: exact for scores that the model explains, finite for all others."""

import math

import pytest

from trinity.study import ratings as module
from trinity.study.ratings import ratings

pytestmark = pytest.mark.core


def expected(difference: float) -> float:
    return 1 / (1 + 10 ** (-difference / 400))


def test_scores_of_the_model_give_back_its_ratings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DRAWN", 0.0)
    true = {0: 0.0, 10: 120.0, 20: 90.0, 30: 700.0}
    pairs = [(10, 0), (20, 0), (20, 10), (30, 20)]
    found = ratings({(one, other): expected(true[one] - true[other]) for one, other in pairs})
    assert found == {version: pytest.approx(rating, abs=1e-3) for version, rating in true.items()}


def test_who_won_all_games_has_a_finite_rating() -> None:
    found = ratings({(10, 0): 1.0, (20, 10): 1.0})
    assert found[0] == 0
    assert found[10] == pytest.approx(400 * math.log10(1.01 / 0.01))
    assert found[20] == pytest.approx(2 * found[10])


def test_versions_that_no_games_connect_to_the_oldest_have_no_rating() -> None:
    found = ratings({(10, 0): 0.75, (20, 10): 0.75, (200, 160): 0.75})
    assert sorted(found) == [0, 10, 20]
    assert found == ratings({(10, 0): 0.75, (20, 10): 0.75})


def test_games_against_oneself_rate_nobody() -> None:
    assert ratings({(0, 0): 0.5}) == ratings({}) == {}


def test_the_order_of_a_pair_does_not_matter() -> None:
    assert ratings({(10, 0): 0.75}) == pytest.approx(ratings({(0, 10): 0.25}))
