"""Plugin files in Trinity-RFT's form, for as long as a test needs them: registries are a process's own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trinity import plugins
from trinity.common.operators import EXPERIENCE_OPERATORS
from trinity.common.rewards import REWARD_FUNCTIONS
from trinity.common.workflows import WORKFLOWS
from trinity.plugins.declarations import REGISTRIES

FILES = Path(__file__).parent


@contextmanager
def loaded(kind: str) -> Iterator[None]:
    """The files of a folder: workflows, algorithms or operators."""
    held: list[dict[str, Any]] = [
        *REGISTRIES.values(),
        plugins.WORKFLOWS,
        plugins.REWARD_FUNCTIONS,
        plugins.EXPERIENCE_OPERATORS,
        WORKFLOWS.modules,
        REWARD_FUNCTIONS.modules,
        EXPERIENCE_OPERATORS.modules,
    ]
    before = [dict(registry) for registry in held]
    folder = FILES / kind
    plugins.load([folder])
    try:
        yield
    finally:
        for registry, names in zip(held, before, strict=True):
            registry.clear()
            registry.update(names)
        sys.path.remove(str(folder))
        for path in folder.glob("*.py"):
            sys.modules.pop(path.stem, None)
