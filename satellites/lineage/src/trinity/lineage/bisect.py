"""`trinity bisect`: the first place at which two runs differ."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trinity.commands import AsJson, command, group
from trinity.reading.render import to_json, visible
from trinity.study.bisect import compare

app = group()

Folder = Annotated[Path, typer.Argument(help="Stage folder of a run (its job folder, if it has no stages)")]


@command(app, "bisect")
def bisect(a: Folder, b: Folder, as_json: AsJson = False) -> int:
    """Show the first place at which two runs differ. Exit code 1 if they do."""
    steps, found = compare(a, b)
    if as_json:
        print(to_json({"steps": steps, "difference": asdict(found) if found else None}))
    elif found is None:
        print(f"equal, bit for bit: {len(steps)} steps, {steps[0]} to {steps[-1]}")
    else:
        print(visible(f"step {found.step}: {found.where} is {found.a} in {a}, {found.b} in {b}"))
    return 1 if found else 0
