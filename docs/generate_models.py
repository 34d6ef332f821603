"""Write the table of docs/models.md from tests/models/families.py: `make docs`. `--check`: compare instead."""

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from models.families import FAMILIES, Family  # noqa: E402

from trinity.config.experts import ADAPTED, REPLAYED  # noqa: E402

TARGET = ROOT / "docs/models.md"
BEGIN, END = "<!-- families: written by `make docs` -->", "<!-- end of the families -->"


def document() -> str:
    """Returns the page with the table written again."""
    before, rest = TARGET.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n" + "\n".join(_table()) + f"\n{END}{rest.split(END)[1]}"


def _table() -> Iterator[str]:
    yield "| models | `model_type` | trains | shared prompts | adapters | replay | engine on CPUs | on an H100 |"
    yield "|---|---|---|---|---|---|---|---|"
    for family in FAMILIES:
        cells = (family.models, f"`{family.kind}`", _trains(family), _shares(family),
                 _adapters(family), _replays(family),
                 _known(family.engine), _known(family.on_gpu))  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def _adapters(family: Family) -> str:
    if not family.adapters:
        return "no"
    if not family.has_experts:
        return "yes"
    return "experts too" if family.kind in ADAPTED else "not of experts"


def _replays(family: Family) -> str:
    if not family.has_experts:
        return "-"
    return "yes" if family.kind in REPLAYED else "no"


def _known(works: bool | str) -> str:
    return f"no: {works}" if isinstance(works, str) else "yes" if works else "not tested"


def _trains(family: Family) -> str:
    how = f"padded: {family.not_packed}" if family.not_packed else "packed"
    return f"its language model, {how}" if family.has_tower else how


def _shares(family: Family) -> str:
    if family.not_packed:
        return "no"
    return "up to its window" if family.windowed else "yes"


if __name__ == "__main__":
    text = document()
    if "--check" not in sys.argv:
        TARGET.write_text(text)
    elif text != TARGET.read_text():
        sys.exit("docs/models.md is old, run `make docs`")
