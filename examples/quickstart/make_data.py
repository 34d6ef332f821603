"""Make the quickstart's data: sums of two numbers below 50 in the form of GSM8K, train and test apart.

    python examples/quickstart/make_data.py [FOLDER]

Every answer is right, but only half of them show the work: 28 + 17 is either "8+7=15, 2+1+1=4" or only stated. After
SFT the model imitates both kinds, and is mostly wrong without the work; reinforcement learning rewards showing it.
"""

import argparse
import json
import random
from pathlib import Path

LIMIT = 50


def answer(a: int, b: int, work: bool) -> str:
    units = a % 10 + b % 10
    tens = a // 10 + b // 10 + units // 10
    steps = f"{a % 10}+{b % 10}={units}, {a // 10}+{b // 10}+{units // 10}={tens}" if work else f"{a}+{b}={a + b}"
    return f"{steps}\n#### {a + b}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="build/quickstart/data", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the split and of which answers show the work")
    parser.add_argument("--limit", type=int, default=LIMIT, help="numbers are below it")
    parser.add_argument("--test-size", type=int, default=128, help="problems kept for the test")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    pairs = [(a, b) for a in range(args.limit) for b in range(args.limit)]
    rng.shuffle(pairs)
    rows = [{"question": f"{a}+{b}", "answer": answer(a, b, rng.random() < 0.5)} for a, b in pairs]
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("test", rows[: args.test_size]), ("train", rows[args.test_size :])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (args.folder / f"{name}.jsonl").write_text(lines)
        print(f"{args.folder / name}.jsonl: {len(part)} problems")


if __name__ == "__main__":
    main()
