"""Write the table of docs/metrics.md from the code: `make docs`. A test compares them.

Imports every module of the product that declares a metric, so the registry of this process has all metrics.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs/metrics.md"
BEGIN, END = "<!-- metrics: written by `make docs` -->", "<!-- end of the metrics -->"
_SOURCES = ("services/*/src", "lib/*/src", "satellites/*/src")
_DECLARATION = re.compile(r'\b(Counter|Gauge|Histogram)\(\s*"trinity_')


@dataclass(frozen=True)
class Family:
    """One metric; `samples` are the names that queries use."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def samples(self) -> tuple[str, ...]:
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (f"{self.name}_total",) if self.kind == "counter" else (self.name,)


def families() -> list[Family]:
    """Returns all metrics of Trinity, by name."""
    for pattern in _SOURCES:
        for root in ROOT.glob(pattern):
            for file in root.rglob("*.py"):
                if _DECLARATION.search(file.read_text()):
                    import_module(".".join(file.relative_to(root).with_suffix("").parts))
    found = []
    collectors: dict[Any, Any] = REGISTRY._collector_to_names
    for collector, names in collectors.items():
        if any(name.startswith("trinity_") for name in names):
            for metric in collector.describe():
                found.append(Family(metric.name, metric.type, tuple(collector._labelnames), metric.documentation))
    return sorted(found, key=lambda family: family.name)


def document() -> str:
    """Returns the page with today's table."""
    before, rest = TARGET.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n" + "\n".join(_table()) + f"\n{END}{rest.split(END)[1]}"


def _table() -> Iterator[str]:
    yield "| metric | labels | meaning |\n|---|---|---|"
    for one in families():
        name = one.samples[0] if one.kind != "histogram" else one.name
        kind = "" if one.kind == "gauge" else f" ({one.kind})"
        labels = ", ".join(f"`{label}`" for label in one.labels)
        yield f"| `{name}`{kind} | {labels} | {one.meaning} |"


if __name__ == "__main__":
    text = document()
    if "--check" in sys.argv:
        sys.exit(TARGET.read_text() != text and "docs/metrics.md is old; run `make docs`")
    TARGET.write_text(text)
