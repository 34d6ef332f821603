"""List WebShop's sessions as tasks: train.jsonl (the first ones) and test.jsonl (those after them).

    python examples/R3L/webshop/get_webshop_data.py --train 4096 --test 100

A session is a number: WebShop's list of goals, shuffled with its own seed, says what it asks for.
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=4096, help="sessions to train on")
    parser.add_argument("--test", type=int, default=100, help="sessions to test on")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent, help="folder of train.jsonl and test.jsonl"
    )
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for name, numbers in (("train", range(args.train)), ("test", range(args.train, args.train + args.test))):
        rows = [{"session_id": number, "target": ""} for number in numbers]
        (args.output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{args.output / name}.jsonl: {len(rows)} sessions")


if __name__ == "__main__":
    main()
