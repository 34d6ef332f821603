"""model.rope_scaling: numbers that are missing, or that its kind does not take."""

from collections.abc import Iterator

from trinity.config.errors import Problem
from trinity.config.schema import Config

_PLACE = "model.rope_scaling"
_NEEDED = {
    "default": (), "linear": ("factor",), "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}  # fmt: skip
_ALLOWED = {**_NEEDED, "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")}


def check_rope(config: Config) -> Iterator[Problem]:
    """Numbers that the kind of scaling needs, or does not take; trinity.data.rope has what becomes of them."""
    scaling = config.model.rope_scaling
    if scaling is None:
        return
    kind, given = scaling.rope_type, {*scaling.model_dump(exclude_none=True)} - {"rope_type"}
    for name in _NEEDED[kind]:
        if name not in given:
            yield Problem(f"{_PLACE}.{name}", f"is missing; rope_type {kind} needs it")
    for name in sorted(given - {*_ALLOWED[kind]}):
        yield Problem(f"{_PLACE}.{name}", f"is not of rope_type {kind}; remove it")
