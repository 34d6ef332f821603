"""Notes every start of a vLLM engine and of a trainer in the file that TRINITY_TEST_STARTS names.

Python imports a `sitecustomize` before the program, in each process whose PYTHONPATH names this folder: children of
tests count without code of tests in the product, however they are started and killed. One line a start: what, pid, and
the test that ran. An engine is one client of an engine core; a trainer is a first rank that initialises DeepSpeed.
"""

import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FILE = "TRINITY_TEST_STARTS"


def note(what: str) -> None:
    """One line, written at once: processes that append to the same file do not mix them."""
    if path := os.environ.get(FILE):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, f"{what}\t{os.getpid()}\t{os.environ.get('PYTEST_CURRENT_TEST', '')}\n".encode())
        os.close(file)


def _count_engines(core_client: ModuleType) -> None:
    start = core_client.MPClient.__init__

    def counted(self: Any, *args: Any, **options: Any) -> None:
        note("vLLM")
        start(self, *args, **options)

    core_client.MPClient.__init__ = counted


def _count_trainers(deepspeed: Any) -> None:
    initialize, noted = deepspeed.initialize, set[int]()

    def counted(*args: Any, **options: Any) -> Any:
        if os.environ.get("RANK", "0") == "0" and os.getpid() not in noted:  # a forked process counts as another one
            noted.add(os.getpid())
            note("trainer")
        return initialize(*args, **options)

    deepspeed.initialize = counted


class _Hook(MetaPathFinder):
    """Changes the two modules right after they were imported; costs nothing where they are not."""

    changes: dict[str, Callable[[ModuleType], None]] = {  # noqa: RUF012
        "vllm.v1.engine.core_client": _count_engines,
        "deepspeed": _count_trainers,
    }

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            self.changes[name](module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


if not any(type(finder).__name__ == _Hook.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _Hook())
