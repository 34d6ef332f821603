"""ALFWorld's own games: those under $ALFWORLD_DATA."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from trinity.runtime.errors import InvalidInput

DATA_VARIABLE = "ALFWORLD_DATA"
SPLITS = ("train", "valid_seen", "valid_unseen")


def game_path(name: str) -> Path:
    """The game file of a row. Raises InvalidInput unless it lies under $ALFWORLD_DATA: the engine evaluates code that
    is in game files, so that a row must not choose any file it likes.
    """
    folder = os.environ.get(DATA_VARIABLE, "")
    if not folder:
        raise InvalidInput("task.game_file", f"cannot be read: set {DATA_VARIABLE} to the folder of ALFWorld's games")
    root = Path(folder).resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root) or path.suffix != ".tw-pddl":
        raise InvalidInput("task.game_file", f"is {name!r}, must be a .tw-pddl file under {DATA_VARIABLE}={root}")
    if not path.is_file():
        raise InvalidInput("task.game_file", f"is {name!r}, which is not there under {DATA_VARIABLE}={root}")
    return path


def find_games(root: Path, split: str) -> Iterator[Path]:
    """The solvable games of a split by name, without those of movable receptacles or slicing, as ALFWorld has it."""
    for path in sorted(root.glob(f"{split}/*/*/game.tw-pddl")):
        if "movable" in str(path) or "Sliced" in str(path):
            continue
        if json.loads(path.read_text()).get("solvable"):
            yield path
