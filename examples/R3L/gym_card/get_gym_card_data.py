"""List hands of Gym-Card's games by their seeds: train.jsonl with all games mixed, test_<game>.jsonl for each.

.venv/bin/python examples/R3L/gym_card/get_gym_card_data.py --train 4000 --test 100
"""

import argparse
import json
from pathlib import Path

GAMES = ("number_line", "ez_points", "points24", "blackjack")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=4000, help="hands to train on, of all games together")
    parser.add_argument("--test", type=int, default=100, help="hands of each game to test on")
    parser.add_argument("--games", nargs="+", choices=GAMES, default=GAMES, help="games to train on")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder of the files")
    args = parser.parse_args()
    train = [{"game": args.games[i % len(args.games)], "seed": args.test + i, "target": ""} for i in range(args.train)]
    files = {f"test_{game}": [{"game": game, "seed": i, "target": ""} for i in range(args.test)] for game in GAMES}
    args.output.mkdir(parents=True, exist_ok=True)
    for name, rows in {**files, "train": train}.items():
        (args.output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{args.output / name}.jsonl: {len(rows)} hands")


if __name__ == "__main__":
    main()
