"""Make Countdown puzzles, all with a solution: train.jsonl and test.jsonl, without a puzzle in both.

.venv/bin/python examples/R3L/countdown/get_countdown_data.py --train 8000 --test 200
"""

import argparse
import json
from pathlib import Path

from trinity.environments.countdown import generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=8000, help="puzzles to train on")
    parser.add_argument("--test", type=int, default=200, help="puzzles to test on")
    parser.add_argument("--numbers", type=int, default=4, help="numbers of a puzzle")
    parser.add_argument("--seed", type=int, default=0, help="of the puzzles")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent, help="folder of train.jsonl and test.jsonl"
    )
    args = parser.parse_args()
    wanted, seen, puzzles = args.train + args.test, set(), []
    for row in generate(4 * wanted, args.seed, args.numbers):
        puzzle = (tuple(sorted(row["nums"])), row["target"])
        if puzzle not in seen and len(puzzles) < wanted:
            seen.add(puzzle)
            puzzles.append(row)
    args.output.mkdir(parents=True, exist_ok=True)
    for name, rows in (("test", puzzles[: args.test]), ("train", puzzles[args.test :])):
        (args.output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{args.output / name}.jsonl: {len(rows)} puzzles")


if __name__ == "__main__":
    main()
