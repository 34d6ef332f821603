"""What a scoring function gets and gives: the same for built-in ones, those of plugins and those of other providers."""

from trinity.sdk.scoring import ScoreItem, Scorer, ScoreResult, as_result

__all__ = ["ScoreItem", "ScoreResult", "Scorer", "as_result"]
