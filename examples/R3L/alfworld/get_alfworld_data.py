"""List ALFWorld's games as tasks: train.jsonl (all training games) and test.jsonl (games in rooms seen in training).

    .venv/bin/pip install -e '.[alfworld]' && .venv/bin/alfworld-download
    .venv/bin/python examples/R3L/alfworld/get_alfworld_data.py --data-path ~/.cache/alfworld/json_2.1.1

The script leaves out games that the engine cannot win: sliced or movable objects, and games marked unsolvable.
"""

import argparse
import json
import os
import sys
from pathlib import Path

SPLITS = {"train": "train", "test": "valid_seen"}


def games(folder: Path) -> list[Path]:
    """Returns the winnable game files in order."""
    found = sorted(folder.glob("*/*/game.tw-pddl"))
    return [path for path in found if not {"movable", "Sliced"} & _words(path) and _solvable(path)]


def _words(path: Path) -> set[str]:
    return {word for word in ("movable", "Sliced") if word in str(path)}


def _solvable(path: Path) -> bool:
    return bool(json.loads(path.read_text()).get("solvable", True))


def main() -> int:
    default = os.environ.get("ALFWORLD_DATA", "~/.cache/alfworld")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", type=Path, default=Path(default) / "json_2.1.1", help="folder with the splits")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent, help="folder of train.jsonl and test.jsonl"
    )
    args = parser.parse_args()
    root = args.data_path.expanduser().absolute()
    args.output.mkdir(parents=True, exist_ok=True)
    for name, split in SPLITS.items():
        rows = [{"game_file": str(path), "target": ""} for path in games(root / split)]
        if not rows:
            print(f"no game that can be won in {root / split}; give the folder with --data-path", file=sys.stderr)
            return 1
        (args.output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{args.output / name}.jsonl: {len(rows)} games")
    if root.parent != Path("~/.cache/alfworld").expanduser():
        print(f"set ALFWORLD_DATA={root.parent} for runs: the environment plays no game that lies elsewhere")
    return 0


if __name__ == "__main__":
    sys.exit(main())
