"""The canary of a version: log-probabilities that the trainer computed and every engine must reproduce after a load."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trinity.weights import Canary


class Engine(Protocol):
    """The part of engine.Engine that measuring needs."""

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[bytes] = ()) -> np.ndarray: ...


@dataclass(frozen=True)
class Measured:
    """An engine's distance from a canary, in nats. `expected` and `computed` are the values where it is largest."""

    mean_error: float
    max_error: float
    expected: float
    computed: float

    def within(self, canary: Canary, precision: str = "") -> bool:
        """Tells if an engine of this precision is sound; False also for values that are not finite."""
        mean, most = canary.allowed(precision)
        return self.mean_error <= mean and self.max_error <= most

    def __str__(self) -> str:
        return (
            f"log-probability {self.expected:.5f} expected, {self.computed:.5f} computed where it differs most; "
            f"mean difference {self.mean_error:.5f}"
        )


def compare(expected: np.ndarray, computed: np.ndarray) -> Measured:
    """Compares two float32 arrays [P], P > 0.

    If a computed value is not finite, the mean is NaN and that value counts as the farthest.
    """
    errors = np.abs(expected.astype(np.float64) - computed.astype(np.float64))
    worst = int(np.argmax(np.where(np.isfinite(errors), errors, np.inf)))
    finite = bool(np.isfinite(errors).all())
    return Measured(
        float(errors.mean()) if finite else math.nan,
        float(errors[worst]) if finite else math.inf,
        float(expected[worst]),
        float(computed[worst]),
    )


async def measure(engines: Sequence[Engine], canary: Canary, max_tokens: int) -> Measured:
    """Returns the worst result of the canary over all engines. Raises EngineFailed.

    Probes are cut to `max_tokens`. Longer probes with images cannot be cut and are left out.
    """
    probes = [probe for probe in canary.probes if not probe.images or len(probe.token_ids) <= max_tokens]
    wanted = np.concatenate([np.array(probe.logprobs[: max_tokens - 1], np.float32) for probe in probes])

    async def one(engine: Engine) -> Measured:
        found = await asyncio.gather(*(engine.logprobs(probe.token_ids[:max_tokens], probe.images) for probe in probes))
        return compare(wanted, np.concatenate(found))

    def distance(measured: Measured) -> float:
        if math.isnan(measured.mean_error):
            return math.inf
        return max(measured.mean_error / canary.mean_tolerance, measured.max_error / canary.max_tolerance)

    return max(await asyncio.gather(*(one(engine) for engine in engines)), key=distance)
