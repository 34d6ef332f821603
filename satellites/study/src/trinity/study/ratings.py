"""Ratings of a policy's versions, from their scores against each other in games."""

import math
from collections.abc import Mapping

_POINTS = 400 / math.log(10)  # of Elo's scale: 400 points more win ten times as often as they lose
# Of a game, drawn, for each pair: a version that won every game has a finite rating.
_DRAWN = 0.02
_ROUNDS, _EXACT = 10_000, 1e-9


def ratings(scores: Mapping[tuple[int, int], float]) -> dict[int, float]:
    """Rates versions by the Bradley-Terry model, in points of Elo's scale; the oldest version has 0.

    Versions that games do not connect to the oldest one, directly or through others, have no rating.

    scores: the share of points that the first version won against the second, 0 to 1, for each pair; all pairs count
    alike. Maximizes the likelihood by the MM algorithm of Hunter, "MM algorithms for generalized Bradley-Terry models",
    The Annals of Statistics 32 (2004), equation 3: g_i = W_i / sum_j N_ij / (g_i + g_j).
    """
    games: dict[int, dict[int, float]] = {}
    won: dict[int, float] = {}
    for (version, other), score in scores.items():
        if version == other:
            continue
        for one, against, points in ((version, other, score), (other, version, 1 - score)):
            pairs = games.setdefault(one, {})
            pairs[against] = pairs.get(against, 0.0) + 1 + _DRAWN
            won[one] = won.get(one, 0.0) + points + _DRAWN / 2
    reached, reaching = set[int](), [min(games)] if games else []
    while reaching:
        if (one := reaching.pop()) not in reached:
            reached.add(one)
            reaching += games[one]
    games = {one: pairs for one, pairs in games.items() if one in reached}
    strength = dict.fromkeys(sorted(games), 1.0)
    for _ in range(_ROUNDS):
        before = dict(strength)
        for one, pairs in games.items():
            strength[one] = won[one] / sum(n / (strength[one] + strength[other]) for other, n in pairs.items())
        if all(abs(math.log(strength[one] / before[one])) < _EXACT for one in strength):
            break
    if not strength:
        return {}
    zero = math.log(strength[min(strength)])
    return {one: _POINTS * (math.log(value) - zero) for one, value in strength.items()}
