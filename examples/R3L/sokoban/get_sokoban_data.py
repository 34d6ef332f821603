"""List Sokoban levels by their seeds: train.jsonl and test.jsonl. The environment makes the level of a seed.

.venv/bin/python examples/R3L/sokoban/get_sokoban_data.py --train 4000 --test 200 --size 6 --boxes 1
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=4000, help="levels to train on")
    parser.add_argument("--test", type=int, default=200, help="levels to test on")
    parser.add_argument("--size", type=int, default=6, help="width and height")
    parser.add_argument("--boxes", type=int, default=1, help="boxes of a level")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent, help="folder of train.jsonl and test.jsonl"
    )
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for name, seeds in (("test", range(args.test)), ("train", range(args.test, args.test + args.train))):
        rows = [{"seed": seed, "size": args.size, "boxes": args.boxes, "target": ""} for seed in seeds]
        (args.output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{args.output / name}.jsonl: {len(rows)} levels")


if __name__ == "__main__":
    main()
