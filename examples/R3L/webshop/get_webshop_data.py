"""List WebShop's sessions as tasks: train.jsonl and test.jsonl, without a goal in both.

    .venv/bin/python examples/R3L/webshop/get_webshop_data.py --train 4096 --test 100

A session is a number, an index into WebShop's list of goals, shuffled with WebShop's seed. The first of its thousands
of goals are for training, the next goals for tests. The built-in small shop (backend mini) has sixty goals, every fifth
for tests; sessions beyond the sixtieth repeat the goals.
"""

import argparse
import json
import os
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

from trinity.environments.webshop.mini import GOALS

BACKENDS = ("mini", "local", "http")


def sessions(backend: str, train: int, test: int) -> dict[str, list[int]]:
    """Returns the numbers of both splits."""
    if backend == "mini":
        return {"train": list(islice(_of_mini(False), train)), "test": list(islice(_of_mini(True), test))}
    return {"train": list(range(train)), "test": list(range(train, train + test))}


def _of_mini(tested: bool) -> Iterator[int]:
    return (number for number in count() if (number % len(GOALS) % 5 == 4) is tested)


def main() -> None:
    backend = os.environ.get("TRINITY_WEBSHOP_BACKEND", "mini")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=4096, help="sessions to train on")
    parser.add_argument("--test", type=int, default=100, help="sessions to test on")
    parser.add_argument("--backend", choices=BACKENDS, default=backend, help="default: $TRINITY_WEBSHOP_BACKEND, mini")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent, help="folder of train.jsonl and test.jsonl"
    )
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for name, numbers in sessions(args.backend, args.train, args.test).items():
        rows = [{"session_id": number, "target": ""} for number in numbers]
        (args.output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{args.output / name}.jsonl: {len(rows)} sessions of backend {args.backend}")


if __name__ == "__main__":
    main()
