"""A teacher's likeliest tokens in the place of each response token, for losses that compare whole distributions."""

from dataclasses import dataclass

import numpy as np

from trinity.plugins.arguments import MOST_TOP_TOKENS
from trinity.runtime.errors import InvalidInput

_ROUNDING = 1e-3  # of the sum of a place's probabilities


@dataclass(frozen=True)
class TopTokens:
    """The k likeliest tokens in the place of each of R response tokens, in falling order.

    ids int32 [R, k]; logprobs float32 [R, k], natural-log probabilities at temperature 1.
    """

    ids: np.ndarray
    logprobs: np.ndarray

    def check(self, field: str, response: int, ids_below: int, bound: float) -> None:
        """Raises InvalidInput unless R is `response`, ids are in the vocabulary, and logprobs are above -bound."""
        shape, k = self.ids.shape, self.ids.shape[1]
        if shape != self.logprobs.shape or len(self.ids) != response:
            problem = f"are ids {list(shape)} and logprobs {list(self.logprobs.shape)}"
            raise InvalidInput(field, f"{problem}; the response has {response} tokens")
        if not 1 <= k <= MOST_TOP_TOKENS:
            raise InvalidInput(f"{field}.ids", f"has {k} tokens for each place, must have 1 to {MOST_TOP_TOKENS}")
        ordered = np.sort(self.ids, axis=1)
        if response and not (ordered[:, 0].min() >= 0 and ordered[:, -1].max() < ids_below):
            problem = f"has {ordered[:, 0].min()} to {ordered[:, -1].max()}; ids are below {ids_below}"
            raise InvalidInput(f"{field}.ids", problem)
        if (ordered[:, 1:] == ordered[:, :-1]).any():
            raise InvalidInput(f"{field}.ids", "has a token twice in a place")
        if not ((self.logprobs <= 1e-4) & (self.logprobs >= -bound)).all():  # NaN fails both comparisons
            raise InvalidInput(f"{field}.logprobs", f"has a number outside [{-bound:g}, 0]")
        if (self.logprobs[:, 1:] > self.logprobs[:, :-1]).any():
            raise InvalidInput(f"{field}.logprobs", "rises within a place; the likeliest token comes first")
        if response and (most := float(np.exp(self.logprobs.astype(np.float64)).sum(1).max())) > 1 + _ROUNDING:
            raise InvalidInput(f"{field}.logprobs", f"has probabilities of a place that add up to {most:g}")
