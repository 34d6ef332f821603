"""Trinity-RFT's sample strategies read the buffer by themselves, which Trinity's trainer does not."""

from typing import Any

from trinity.common.refusals import NotMapped
from trinity.common.registry import Registry


class SampleStrategy:
    """Its `sample(step)` reads a batch from a buffer. Refused where it is registered."""


def _add(name: str, kind: Any) -> None:
    problem = f"{name!r} of SAMPLE_STRATEGY reads the buffer; Trinity's decide of each group whether it is trained"
    raise NotMapped(problem, "sample-strategies")


SAMPLE_STRATEGY = Registry("SAMPLE_STRATEGY", _add, lambda: ())
