"""algorithm.enable_router_replay: the models that it is for."""

from collections.abc import Iterator

from trinity.config.errors import Problem
from trinity.config.experts import REPLAYED, model_type_of
from trinity.config.schema import Config

KEY = "algorithm.enable_router_replay"


def check_router_replay(config: Config) -> Iterator[Problem]:
    """Refuses it for models whose gates are not replayed, and without an engine that records."""
    if not config.algorithm.enable_router_replay:
        return
    kind = model_type_of(config.model.model_path or "")
    if kind and kind not in REPLAYED:
        yield Problem(KEY, not_replayed(kind))
    if config.reproducible:
        yield Problem(KEY, "is true beside reproducible: true; vLLM records routes only with its prefix cache")


def not_replayed(kind: str) -> str:
    known = ", ".join(name for name in REPLAYED if not name.endswith("_text"))
    return f"is true, and a model of type {kind} is not replayed, but {known}; set it to false"
